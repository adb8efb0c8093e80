"""A client of several engine cores with bare sockets: it spreads requests, sends them again, and notes what it is told.

It relies on nothing but what the messages promise, and checks that as it goes. The fake model adds one, so that a
token that is lost, doubled or of another request shows.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import psutil
import zmq
from process_support.engine_under_test import EngineUnderTest, wait_for
from process_support.fake_executor import VOCAB_SIZE
from process_support.raw_client import RawClient

from nbengine.ipc.control_messages import (
    Attached,
    EngineDead,
    EngineLost,
    EngineReady,
    RanksChanged,
    Scaled,
    ScaleElasticEP,
)
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreRequest,
    EngineCoreRequestType,
    decode_announcement,
    decode_home,
)
from nbengine.sampling_params import SamplingParams

PATIENCE = 60.0
"""Seconds for what happens at once on a machine with nothing else to do."""

Home = tuple[int, int]
"""Rank and incarnation."""


@dataclass
class Asked:
    """A request, and how it fares."""

    name: str
    first: int
    length: int
    rank: int | None
    home: Home | None = None
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    lost: str | None = None
    num_returned: int = 0

    @property
    def is_complete(self) -> bool:
        expected = [(self.first + n + 1) % VOCAB_SIZE for n in range(self.length)]
        return self.done and self.tokens == expected


class RanksClient(RawClient):
    """Everything happens in `run_until`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.input.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.news: list = []
        self.ranks: set[int] = set()
        self.ready_of: dict[int, EngineReady] = {}
        self.connected: dict[int, int] = {}
        self.gone: set[Home] = set()
        self.asked: dict[str, Asked] = {}
        self.unsent: deque[Asked] = deque()
        self.poller = zmq.Poller()
        for socket in (self.host, self.input, self.output):
            self.poller.register(socket, zmq.POLLIN)

    def join(self, ready: int) -> RanksClient:
        """Attach, and wait until as many ranks take requests."""
        self.tell(self.attach_message())
        self.run_until(lambda: len(self.usable()) == ready, "the ranks")
        return self

    def ask(self, name: str, first: int = 1, length: int = 8, rank: int | None = None) -> Asked:
        """Ask for `length` tokens after `first`, of any rank or of one."""
        asked = self.asked[name] = Asked(name, first, length, rank)
        self.unsent.append(asked)
        self.send_unsent()
        return asked

    def scale(self, size: int) -> Scaled:
        """Have another number of cores, and return the answer."""
        before = len(self.heard(Scaled))
        self.tell(ScaleElasticEP(size))
        self.run_until(lambda: len(self.heard(Scaled)) > before, "the end of the scaling")
        return self.heard(Scaled)[-1]

    def wait_done(self, *asked: Asked) -> None:
        self.run_until(lambda: all(each.done or each.lost for each in asked), "the requests")

    def wait_lost(self) -> EngineLost:
        before = len(self.heard(EngineLost))
        self.run_until(lambda: len(self.heard(EngineLost)) > before, "the news of a death")
        return self.heard(EngineLost)[-1]

    def wait_dead(self, deadline: float = PATIENCE) -> EngineDead:
        self.run_until(lambda: self.heard(EngineDead), "the end", deadline)
        # What the cores had said before comes another way.
        while self.output.poll(100):
            self.read_one()
        return self.heard(EngineDead)[0]

    def wait_ranks(self, *ranks: int) -> None:
        self.run_until(lambda: self.usable() == set(ranks), f"the ranks {ranks}")

    def heard(self, kind: type) -> list:
        return [message for message in self.news if isinstance(message, kind)]

    def changes(self) -> list:
        """List what the host said about ranks, without what they said about themselves."""
        return [m for m in self.news if isinstance(m, RanksChanged | EngineLost | EngineReady)]

    def pid(self, rank: int) -> int:
        return self.ready_of[rank].pid

    def usable(self) -> set[int]:
        return {
            rank
            for rank in self.ranks
            if rank in self.ready_of
            and self.connected.get(rank) == self.ready_of[rank].incarnation
            and (rank, self.connected[rank]) not in self.gone
        }

    def run_until(self, condition, what: str, deadline: float = PATIENCE) -> None:
        """Take in what comes until the condition holds."""
        end = time.monotonic() + deadline
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {deadline} s; heard {self.news[-5:]}"
            self.take_in(100)

    def take_in(self, timeout_ms: int) -> None:
        """Take in what has come, or comes in time."""
        self.poller.poll(timeout_ms)
        if self.input.poll(0):
            _, rank, incarnation = decode_announcement(*self.input.recv_multipart(), self.secret)
            self.connected[rank] = incarnation
        if self.host.poll(0):
            self.on_host(self.control_decoder.decode(self.host.recv()))
        if self.output.poll(0):
            self.read_one()
        self.send_unsent()

    # The host.

    def on_host(self, message) -> None:
        self.news.append(message)
        match message:
            case Attached(client_index, engine_ranks):
                self.client_index = client_index
                self.ranks = set(engine_ranks)
            case EngineReady():
                self.ready_of[message.rank] = message
            case RanksChanged(engine_ranks):
                assert all(rank in self.ready_of for rank in engine_ranks)
                self.ranks = set(engine_ranks)
                self.take_back_from_departed()
            case EngineLost(rank, incarnation):
                assert rank not in self.ranks
                while self.output.poll(0):
                    self.read_one()
                self.gone.add((rank, incarnation))
                for asked in self.at((rank, incarnation)):
                    if asked.tokens:
                        asked.home, asked.lost = None, message.cause
                self.take_back_from_departed()

    # Engine cores.

    def send_unsent(self) -> None:
        usable = self.usable()
        for asked in list(self.unsent):
            allowed = usable if asked.rank is None else usable & {asked.rank}
            if not allowed:
                continue
            rank = min(allowed, key=lambda rank: (len(self.at((rank, self.connected[rank]))), rank))
            params = SamplingParams(max_tokens=asked.length, temperature=0.0, ignore_eos=True)
            request = EngineCoreRequest(asked.name, [asked.first], params)
            frames = (EngineCoreRequestType.ADD.value, *self.encoder.encode(request))
            try:
                self.input.send_multipart([self.identity(rank), *frames])
            except zmq.ZMQError:
                # It has just gone, and its news are under way.
                continue
            asked.home = (rank, self.connected[rank])
            self.unsent.remove(asked)

    def at(self, home: Home) -> list[Asked]:
        return [asked for asked in self.asked.values() if asked.home == home]

    def read_one(self) -> None:
        frames = self.output.recv_multipart()
        if frames[0] == ENGINE_CORE_DEAD:
            rank, incarnation = decode_home(*frames[1:], self.secret)
            self.gone.add((rank, incarnation))
            self.take_back_from_departed()
            return
        outputs = self.decoder.decode(frames)
        if outputs.utility_output is not None:
            self.utility[outputs.utility_output.call_id] = outputs.utility_output
        home = (outputs.engine_index, outputs.incarnation)
        for output in outputs.outputs:
            asked = self.asked[output.request_id]
            if asked.home != home:
                continue
            asked.tokens += output.new_token_ids
            if output.finished:
                asked.home, asked.done = None, True
        for name in outputs.returned or ():
            asked = self.asked[name]
            assert asked.home == home
            assert not asked.tokens
            asked.num_returned += 1
            self.take_back(asked)

    def take_back_from_departed(self) -> None:
        """Take back the requests that a core which has gone did not answer: they never reached it, or died
        with it."""
        for asked in self.asked.values():
            if asked.home in self.gone and asked.home[0] not in self.ranks and not asked.tokens:
                self.take_back(asked)

    def take_back(self, asked: Asked) -> None:
        asked.home = None
        self.unsent.append(asked)


class Traffic:
    """Clients that always have requests under way."""

    def __init__(self, *clients: RanksClient) -> None:
        self.clients = clients
        self.asked: list[Asked] = []

    def run_until(self, condition, what: str, *, more: bool = True) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {PATIENCE} s"
            for client in self.clients:
                while more and sum(not asked.done for asked in client.asked.values()) < 12:
                    number = len(self.asked)
                    name = f"{client.client_index}-{number}"
                    self.asked.append(client.ask(name, 7 * number % 500, 3 + 11 * number % 40))
                client.take_in(2)

    def finish(self) -> None:
        self.run_until(lambda: all(asked.done for asked in self.asked), "the last requests", more=False)

    def scale(self, size: int) -> Scaled:
        client = self.clients[0]
        before = len(client.heard(Scaled))
        client.tell(ScaleElasticEP(size))
        self.run_until(lambda: len(client.heard(Scaled)) > before, f"the scaling to {size}")
        return client.heard(Scaled)[-1]

    def wait_for_ranks(self, size: int) -> None:
        """Wait until ranks 0 to `size` - 1 are all that take requests, and some more are done."""
        ranks = set(range(size))
        self.run_until(lambda: all(client.usable() == ranks for client in self.clients), "the ranks")
        enough = self.num_done + 10
        self.run_until(lambda: self.num_done > enough, "more requests")

    @property
    def num_done(self) -> int:
        return sum(asked.done for asked in self.asked)


def join(engine: EngineUnderTest, ready: int) -> RanksClient:
    client = RanksClient(engine.info)
    engine.clients.append(client)
    return client.join(ready)


def core_pids(engine: EngineUnderTest) -> set[int]:
    return {child.pid for child in psutil.Process(engine.host.pid).children()}


def new_core(engine: EngineUnderTest, known: set[int]) -> psutil.Process:
    """The process of a core that has just been started."""
    wait_for(lambda: core_pids(engine) - known, "a new engine core", PATIENCE)
    (pid,) = core_pids(engine) - known
    return psutil.Process(pid)
