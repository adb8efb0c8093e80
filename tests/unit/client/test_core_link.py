"""A client's requests under every order of news: cores die, come back, leave and join, on channels that do not wait for
each other. The cores, the host and the network are simulated; sockets are lists."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

from nbengine.client.routing import core_link
from nbengine.client.routing.core_link import CoreLink
from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.errors import EngineDeadError
from nbengine.ipc.control_messages import EngineLost, EngineReady, RanksChanged, Scaled
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
    UtilityRequest,
    encode_announcement,
    encode_incarnation,
    engine_identity,
)
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.runtime.connection import ConnectionInfo
from nbengine.sampling_params import SamplingParams

NUM_SCHEDULES = 150
MAX_RANKS = 4
SECRET = b"known to the cores"
ENCODER = MsgpackEncoder()
ADDS = MsgpackDecoder(EngineCoreRequest)
ABORTS: MsgpackDecoder[list[str]] = MsgpackDecoder(list[str])
CALLS = MsgpackDecoder(UtilityRequest)


class FakeSocket:
    """A socket that keeps in `sent` what is sent, and reads from `incoming`."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.incoming: deque[list[Any]] = deque()
        self.closed = False

    def send_multipart(self, frames: Any, **_: Any) -> None:
        self.sent.append(tuple(frames))

    def poll(self, timeout: int = 0) -> int:
        del timeout
        return len(self.incoming)

    def recv_multipart(self, flags: int = 0) -> list[Any]:
        del flags
        return self.incoming.popleft()

    def setsockopt(self, *_: Any) -> None:
        return

    def close(self) -> None:
        self.closed = True


class Core:
    """One start of an engine core: it gives each request the tokens 0, 1, 2 … up to its `max_tokens`."""

    def __init__(self, rank: int, incarnation: int) -> None:
        self.rank, self.incarnation = rank, incarnation
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.to_client: deque[list[Any]] = deque()
        self.announced = False
        self.leaving = False
        self.gone = False
        self.unbegun: dict[str, int] = {}
        self.running: dict[str, list[int]] = {}
        self.begun: set[str] = set()

    def put(self, **fields: Any) -> None:
        outputs = EngineCoreOutputs(engine_index=self.rank, incarnation=self.incarnation, **fields)
        self.to_client.append(ENCODER.encode(outputs))

    def read_one(self) -> None:
        _, kind, *frames = self.inbox.popleft()
        if kind == EngineCoreRequestType.ADD.value:
            request = ADDS.decode(frames)
            assert request.request_id not in self.unbegun
            assert request.request_id not in self.running
            if self.leaving:
                self.put(returned=[request.request_id])
            else:
                assert request.sampling_params is not None
                self.unbegun[request.request_id] = request.sampling_params.max_tokens or 0
        elif kind == EngineCoreRequestType.ABORT.value:
            for request_id in ABORTS.decode(frames):
                self.unbegun.pop(request_id, None)
                self.running.pop(request_id, None)
        else:
            call = CALLS.decode(frames)
            self.put(utility_output=UtilityOutput(call.call_id, result=True))

    def step(self, chance: random.Random) -> None:
        for request_id in [name for name in self.unbegun if chance.random() < 0.5]:
            self.running[request_id] = [0, self.unbegun.pop(request_id)]
            self.begun.add(request_id)
        outputs = []
        for request_id, progress in list(self.running.items()):
            token, length = progress
            progress[0] += 1
            finished = progress[0] == length
            if finished:
                del self.running[request_id]
            reason = FinishReason.LENGTH if finished else None
            outputs.append(EngineCoreOutput(request_id, [token], finish_reason=reason))
        if outputs:
            self.put(outputs=outputs)

    def greet(self) -> None:
        self.put()

    def leave(self) -> None:
        self.leaving = True
        if self.unbegun:
            self.put(returned=list(self.unbegun))
            self.unbegun.clear()

    def end(self, *, farewell: bool) -> None:
        self.gone = True
        if farewell:
            stamp = [engine_identity(self.rank, SECRET), encode_incarnation(self.incarnation)]
            self.to_client.append([ENGINE_CORE_DEAD, *stamp])


class World:
    """A host, its cores and one client; `chance` decides what happens next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
        self.chance = chance
        self.sockets: list[FakeSocket] = []

        def make_socket(*_: Any, **__: Any) -> FakeSocket:
            self.sockets.append(FakeSocket())
            return self.sockets[-1]

        monkeypatch.setattr(core_link, "make_socket", make_socket)
        monkeypatch.setattr(core_link, "bound_address", lambda socket: "nowhere")
        monkeypatch.setattr(core_link, "StatsFeed", None)
        monkeypatch.setattr(CoreLink, "_follow_stats", lambda self: None)
        config = EngineConfig(model=ModelConfig(model="m"), parallel=ParallelConfig(data_parallel_size=2))
        info = ConnectionInfo(
            name="e", run_dir="/nowhere", log_path="", host_pid=0, host_started=0, config=config
        )
        monkeypatch.setattr(core_link, "new_secret", lambda: SECRET)
        self.link = CoreLink(info, self, self, self, None)
        self.input, self.output = self.sockets
        self.cores: list[Core] = []
        self.host: deque[Any] = deque()
        self.incarnations = [-1] * MAX_RANKS
        self.listed: list[int] = []
        self.killed: set[str] = set()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[EngineCoreOutput]] = {}
        self.lengths: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.farewells: list[int] = []
        self.num_waits = self.num_told = 0
        for rank in (0, 1):
            self.join(rank)

    # What the link tells its listener and its consumer, and asks of its thread.

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            assert output.request_id not in self.aborted
            self.tokens[output.request_id] += output.new_token_ids
            if output.finished:
                self.ends[output.request_id].append(output)

    def on_farewell(self, rank: int, incarnation: int) -> None:
        del incarnation
        self.farewells.append(rank)

    def on_usable(self) -> None: ...

    def watch(self, socket: Any, handle: Any) -> None: ...

    def unwatch(self, socket: Any) -> None: ...

    def on_sent(self, socket: Any) -> None: ...

    # What may happen.

    def join(self, rank: int) -> None:
        self.incarnations[rank] += 1
        core = Core(rank, self.incarnations[rank])
        self.cores.append(core)
        self.listed = sorted([*self.listed, rank])
        ready = EngineReady(rank, 64, 16, 512, 0, 0, "cpu", "float32", [], 1, incarnation=core.incarnation)
        self.host += [ready, RanksChanged(self.listed)]

    def kill(self, core: Core) -> None:
        # Also what it has finished, if the news of its end come before its last outputs.
        self.killed |= core.begun
        core.end(farewell=self.chance.random() < 0.5)
        for _ in range(min(self.chance.randrange(3), len(core.to_client))):
            core.to_client.pop()
        if core.rank in self.listed:
            self.listed.remove(core.rank)
            self.host.append(RanksChanged(list(self.listed)))
        self.host.append(EngineLost(core.rank, core.incarnation, "killed"))

    def dismiss(self, core: Core) -> None:
        self.listed.remove(core.rank)
        self.host.append(RanksChanged(list(self.listed)))
        core.leave()

    def act(self, *, deaths: bool) -> None:
        chance = self.chance
        alive = [core for core in self.cores if not core.gone]
        staying = [core for core in alive if not core.leaving]
        what = chance.random()
        if what < 0.25 and len(self.lengths) < 40:
            self.request()
        elif what < 0.3 and self.lengths:
            self.abort(chance.choice(list(self.lengths)))
        elif what < 0.33 and deaths and len(staying) > 1:
            self.kill(chance.choice(alive))
        elif what < 0.36 and len(staying) > 1:
            self.dismiss(chance.choice(staying))
        elif what < 0.42:
            absent = [r for r in range(MAX_RANKS) if all(core.rank != r for core in alive)]
            if absent:
                self.join(chance.choice(absent))
        elif what < 0.44:
            self.wait_for_all()
        elif what < 0.6:
            chance.choice(alive).step(chance)
        else:
            self.pass_one()

    def wait_for_all(self) -> None:
        def told(future: Future[int]) -> None:
            # An assertion in a callback would be logged only.
            self.num_told += self.link.router.table.all_connected and future.result() == 3

        self.num_waits += 1
        future: Future[int] = Future()
        future.add_done_callback(told)
        self.link.on_scaled(future, Scaled(3))

    def request(self) -> None:
        request_id = f"r{len(self.lengths)}"
        self.lengths[request_id] = self.chance.randint(1, 6)
        self.tokens[request_id], self.ends[request_id] = [], []
        params = SamplingParams(max_tokens=self.lengths[request_id])
        self.link.add(EngineCoreRequest(request_id, [1, 2, 3], params))
        self.carry()

    def abort(self, request_id: str) -> None:
        # As an output processor does: nothing is delivered any more.
        if not self.ends[request_id]:
            self.aborted.add(request_id)
            self.link.abort([request_id])
            self.carry()

    def carry(self) -> None:
        """Hand a message to the peer of that name which has connected last, or drop it, as a ROUTER does."""
        for frames in self.input.sent:
            peers = [c for c in self.cores if c.announced and engine_identity(c.rank, SECRET) == frames[0]]
            if peers and not peers[-1].gone:
                peers[-1].inbox.append(frames)
        self.input.sent.clear()

    def pass_one(self) -> bool:
        """Let one message more arrive, on any channel; return False if there is none."""
        options: list[Any] = []
        if self.host:
            options.append(self.pass_from_host)
        for core in self.cores:
            if not core.announced and not core.gone:
                options.append(lambda core=core: self.announce(core))
            if core.to_client:
                options.append(lambda core=core: self.pass_output(core))
            if core.inbox and not core.gone:
                options.append(core.read_one)
            if core.leaving and not (core.gone or core.inbox or core.running):
                options.append(lambda core=core: core.end(farewell=True))
        if not options:
            return False
        self.chance.choice(options)()
        self.carry()
        return True

    def announce(self, core: Core) -> None:
        core.announced = True
        core.greet()
        self.link._on_input([engine_identity(core.rank, SECRET), encode_announcement(0, core.incarnation)])

    def pass_output(self, core: Core) -> None:
        self.link._on_output(core.to_client.popleft())

    def pass_from_host(self) -> None:
        match self.host.popleft():
            case RanksChanged(ranks):
                self.link.set_ranks(ranks)
            case EngineReady() as ready:
                self.link.on_ready(ready)
            case EngineLost() as lost:
                self.link.on_lost(lost)

    def settle(self) -> None:
        """Let everything arrive and every request end."""
        for _ in range(100_000):
            if not self.pass_one():
                alive = [core for core in self.cores if core.unbegun or (core.running and not core.gone)]
                alive = [core for core in alive if not core.gone]
                if not alive:
                    return
                for core in alive:
                    core.step(self.chance)
        raise AssertionError("it does not come to an end")

    def check(self, *, deaths: bool) -> None:
        router = self.link.router
        assert (router.num_in_flight, router.num_waiting) == (0, 0)
        for request_id, length in self.lengths.items():
            if request_id in self.aborted:
                continue
            (end,) = self.ends[request_id]
            if end.finish_reason is FinishReason.ERROR:
                assert deaths
                assert end.lost_rank is not None
                assert request_id in self.killed
                assert self.tokens[request_id] == list(range(len(self.tokens[request_id])))
                assert self.tokens[request_id]
            else:
                assert self.tokens[request_id] == list(range(length))
        assert router.table.all_connected
        scores = [router.balancer.score(rank) for rank in router.balancer.ranks]
        assert not any(scores)
        assert self.num_told == self.num_waits


@pytest.mark.parametrize("deaths", [False, True])
def test_no_request_is_lost_or_repeated_whatever_the_order_of_news(
    monkeypatch: pytest.MonkeyPatch, deaths: bool
) -> None:
    num_waits = 0
    for seed in range(NUM_SCHEDULES):
        world = World(monkeypatch, random.Random(seed))
        try:
            for _ in range(250):
                world.act(deaths=deaths)
                assert world.num_told == world.num_waits or not world.link.router.table.all_connected
            world.settle()
            world.check(deaths=deaths)
            num_waits += world.num_waits
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
        finally:
            world.link.close()
    assert num_waits > NUM_SCHEDULES


def test_outputs_that_the_news_of_the_engines_end_has_overtaken_still_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, random.Random(0))
    world.settle()
    world.lengths["r"] = 9
    world.tokens["r"], world.ends["r"] = [], []
    world.link.add(EngineCoreRequest("r", [1], SamplingParams(max_tokens=9)))
    world.carry()
    (core,) = [core for core in world.cores if core.inbox]
    core.read_one()
    while len(core.to_client) < 3:
        core.step(world.chance)
    world.output.incoming.extend(core.to_client)
    world.link.on_dead(EngineDeadError("it was killed"))
    assert world.tokens["r"] == [0, 1, 2]
    world.link.close()
    world.link.on_dead(EngineDeadError("nobody reads any more"))


@pytest.mark.parametrize("identity", [engine_identity(0), engine_identity(0, b"a guess"), b""])
def test_a_peer_without_the_secret_is_no_engine_core(
    monkeypatch: pytest.MonkeyPatch, identity: bytes
) -> None:
    world = World(monkeypatch, random.Random(0))
    world.settle()
    usable = dict(world.link.router.table.usable)
    assert 0 in usable
    stamp = [identity, encode_incarnation(usable[0].incarnation + 1)]
    world.link._on_input(stamp)
    world.link._on_output([ENGINE_CORE_DEAD, *stamp])
    world.link._on_output([ENGINE_CORE_DEAD])
    assert world.link.router.table.usable == usable
    assert world.farewells == []
    world.link.close()


def test_the_requests_that_stop_strings_have_ended_are_named_in_a_frame_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, random.Random(0))
    world.settle()
    for name in ("stopped", "dropped"):
        world.lengths[name] = 9
        world.tokens[name], world.ends[name] = [], []
        world.link.add(EngineCoreRequest(name, [1], SamplingParams(max_tokens=9)))
    world.input.sent.clear()
    world.link.abort(["stopped", "dropped"], {"stopped", "somebody else's"})
    aborts = [frames[2:] for frames in world.input.sent if frames[1] == EngineCoreRequestType.ABORT.value]
    ids = [request_id for frames in aborts for request_id in ABORTS.decode(frames[:1])]
    stopped = [
        request_id for frames in aborts for request_id in (ABORTS.decode(frames[1:]) if frames[1:] else ())
    ]
    assert sorted(ids) == ["dropped", "stopped"]
    assert stopped == ["stopped"]
    world.link.close()
