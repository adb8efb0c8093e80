"""A client that lost its lease is usable again, in whatever order the news of its three connections come.

The host's link, the cores' two connections and the thread of the sockets are simulated; the client's own code is real.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nbengine.client import mp
from nbengine.client.mp import MPClient
from nbengine.client.routing import core_link
from nbengine.client.routing.core_link import CoreLink
from nbengine.client.routing.core_table import CoreTable
from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.errors import LeaseExpiredError, NBEngineError
from nbengine.ipc.control_messages import EngineLost, EngineReady
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    encode_announcement,
    encode_incarnation,
    engine_identity,
)
from nbengine.ipc.serial import MsgpackEncoder
from nbengine.runtime.connection import ConnectionInfo
from nbengine.sampling_params import SamplingParams
from tests.unit.client.test_core_link import FakeSocket

ENCODER = MsgpackEncoder()
NUM_HISTORIES = 3000
LOST = LeaseExpiredError("lost")


class Thread:
    """The thread of the sockets is the test: it runs what is `posted` when the test says so."""

    def __init__(self) -> None:
        self.posted: deque[Callable[[], None]] = deque()

    def start(self, *calls: Any) -> None: ...

    def run_soon(self, function: Callable[..., None], *args: Any) -> None:
        self.posted.append(lambda: function(*args))

    def watch(self, socket: Any, handle: Any) -> None: ...

    def unwatch(self, socket: Any) -> None: ...

    def on_sent(self, socket: Any) -> None: ...

    def request_close(self) -> None: ...

    def close(self) -> None: ...


class Consumer:
    def __init__(self) -> None:
        self.delivered: list[EngineCoreOutputs] = []

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        self.delivered.append(outputs)

    def on_error(self, error: NBEngineError, *, dead: bool, client_index: int) -> None: ...


class FakeHostLink:
    def __init__(self, *_: Any) -> None:
        self.farewells: list[tuple[int, int]] = []

    def start(self) -> None: ...

    def core_died(self, rank: int, incarnation: int) -> None:
        self.farewells.append((rank, incarnation))


class World:
    """One client, and on each channel what is under way to it: in order there, in any order between the channels."""

    def __init__(self, num_ranks: int) -> None:
        config = EngineConfig(ModelConfig("m"), parallel=ParallelConfig(data_parallel_size=num_ranks))
        info = ConnectionInfo(
            name="e", run_dir="/nowhere", log_path="", host_pid=0, host_started=0, config=config
        )
        self.thread, self.consumer = Thread(), Consumer()
        self.client = MPClient(info, self.thread, self.consumer)
        self.input = self.client.cores._input
        self.secret = self.client.cores.secret
        self.ranks = list(range(num_ranks))
        self.incarnations = dict.fromkeys(self.ranks, 0)
        self.epoch = 0
        self.from_host: deque[Callable[[], None]] = deque()
        self.from_cores: dict[tuple[str, int], deque[Callable[[], None]]] = {
            (kind, rank): deque() for kind in ("input", "output") for rank in self.ranks
        }

        self.heard: dict[int, tuple[int, int]] = {}
        """Epoch and incarnation of the last connection that a rank has announced, by rank."""

    # What happens elsewhere, and what the client will hear of it.

    def lose_lease(self) -> None:
        self.from_host.append(lambda: self.client.on_lease_lost(LOST))

    def attach(self) -> None:
        self.epoch += 1
        epoch, incarnations = self.epoch, dict(self.incarnations)

        def hear() -> None:
            self.client.on_attached(epoch, list(incarnations), "")
            for rank, incarnation in incarnations.items():
                self.client.on_ready(ready(rank, incarnation))

        self.from_host.append(hear)
        for rank in self.ranks:
            self.announce(rank)

    def announce(self, rank: int) -> None:
        connection = self.epoch, self.incarnations[rank]
        frames = [engine_identity(rank, self.secret), encode_announcement(*connection)]

        def hear() -> None:
            self.heard[rank] = connection
            self.client.cores._on_input(frames)

        self.from_cores["input", rank].append(hear)

    def put(self, rank: int, request_id: str) -> None:
        output = EngineCoreOutput(request_id, [1], finish_reason=FinishReason.LENGTH)
        frames = ENCODER.encode(
            EngineCoreOutputs(engine_index=rank, outputs=[output], incarnation=self.incarnations[rank])
        )
        self.from_cores["output", rank].append(lambda: self.client.cores._on_output(frames))

    def replace(self, rank: int) -> None:
        """Let a core say good-bye and die; the next one comes up and connects for the present lease."""
        before = self.incarnations[rank]
        frames = [ENGINE_CORE_DEAD, engine_identity(rank, self.secret), encode_incarnation(before)]
        self.from_cores["output", rank].append(lambda: self.client.cores._on_output(frames))
        others = [other for other in self.ranks if other != rank]
        self.incarnations[rank] += 1
        after = ready(rank, self.incarnations[rank])
        self.from_host += [
            lambda: self.client.on_ranks_changed(others),
            lambda: self.client.on_engine_lost(EngineLost(rank, before, "killed")),
            lambda: self.client.on_ready(after),
            lambda: self.client.on_ranks_changed(self.ranks),
        ]
        self.announce(rank)

    # How the news arrive.

    def step(self, chance: random.Random) -> bool:
        """Take in one message more, on any channel; return False if there is none."""
        channels = self.channels()
        if channels:
            chance.choice(channels).popleft()()
        for rank, home in self.client.cores.router.table.usable.items():
            assert self.heard[rank] == (self.client.cores.client_index, home.incarnation)
        return bool(channels)

    def channels(self) -> list[deque[Callable[[], None]]]:
        return [queue for queue in (self.from_host, self.thread.posted, *self.from_cores.values()) if queue]

    def settle(self) -> None:
        while self.thread.posted:
            self.thread.posted.popleft()()

    def check_usable(self) -> None:
        self.client.check_alive()
        self.input.sent.clear()
        for rank in self.ranks:
            params = SamplingParams(max_tokens=1)
            self.client.add_request(EngineCoreRequest(f"after-{rank}", [1], params, data_parallel_rank=rank))
        self.settle()
        assert [frames[0] for frames in self.input.sent] == [
            engine_identity(rank, self.secret) for rank in self.ranks
        ]


def ready(rank: int, incarnation: int) -> EngineReady:
    return EngineReady(rank, 64, 16, 512, 0, 0, "cpu", "float32", [], 1, incarnation=incarnation)


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    monkeypatch.setattr(core_link, "make_socket", lambda *_, **__: FakeSocket())
    monkeypatch.setattr(core_link, "bound_address", lambda socket: "nowhere")
    monkeypatch.setattr(CoreLink, "_follow_stats", lambda self: None)
    monkeypatch.setattr(mp, "HostLink", FakeHostLink)
    monkeypatch.setattr(ConnectionInfo, "make_context", lambda self: None)

    def make(num_ranks: int) -> World:
        world = World(num_ranks)
        world.attach()
        for queue in (world.from_host, *world.from_cores.values()):
            while queue:
                queue.popleft()()
        world.settle()
        world.check_usable()
        return world

    return make


def orders(*lengths: int) -> Iterator[tuple[int, ...]]:
    """Yield every order in which channels with these numbers of messages can be read."""
    names = [index for index, length in enumerate(lengths) for _ in range(length)]
    yield from sorted(set(itertools.permutations(names)))


def test_every_order_of_a_lost_lease_and_a_new_one_ends_with_a_usable_client(
    make_world: Callable[[int], World],
) -> None:
    # Two messages of the host, the announcement, a late output, and what the first have the thread of the sockets do.
    tried = 0
    for order in orders(2, 1, 1, 3):
        world = make_world(1)
        world.lose_lease()
        world.attach()
        world.put(0, "after-0")
        queues = [world.from_host, world.from_cores["input", 0], world.from_cores["output", 0]]
        for index in order:
            if index < len(queues):
                queues[index].popleft()()
            elif world.thread.posted:
                world.thread.posted.popleft()()
        world.settle()
        world.check_usable()
        tried += 1
    assert tried == 420


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_any_history_of_leases_and_cores_ends_with_a_usable_client(
    make_world: Callable[[int], World], num_ranks: int
) -> None:
    for seed in range(NUM_HISTORIES // num_ranks):
        chance = random.Random(seed)
        world = make_world(num_ranks)
        for _ in range(chance.randint(1, 4)):
            if chance.random() < 0.3 and num_ranks > 1:
                world.replace(chance.choice(world.ranks))
            else:
                world.lose_lease()
                world.attach()
            world.put(chance.choice(world.ranks), "r")
            for _ in range(chance.randrange(12)):
                world.step(chance)
        while world.step(chance):
            pass
        world.check_usable()
        known = {output.request_id for outputs in world.consumer.delivered for output in outputs.outputs}
        assert "r" not in known, seed


def test_a_lease_that_is_lost_while_the_client_goes_on_after_another_is_known_to_be_lost(
    make_world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(1)
    client, table = world.client, CoreTable
    world.lose_lease()
    world.attach()
    world.from_host.popleft()()
    world.from_host.popleft()()
    world.from_cores["input", 0].popleft()()
    link = threading.Thread(target=client.on_lease_lost, args=(LeaseExpiredError("again"),))
    all_usable = table.all_usable.fget
    assert all_usable is not None

    def interrupted(found: CoreTable) -> bool:
        is_usable = bool(all_usable(found))
        if is_usable and client.cores.client_index == 2 and link.ident is None:
            # The client is about to take the first loss back; the link's thread gets as far as it can.
            link.start()
            link.join(0.2)
        return is_usable

    monkeypatch.setattr(table, "all_usable", property(interrupted))
    for _ in range(len(world.thread.posted)):
        world.thread.posted.popleft()()
    link.join()
    with pytest.raises(LeaseExpiredError, match="again"):
        client.check_alive()
