"""What the host decides: events in, actions out, no I/O and no clock of its own.

STARTING ── every core READY ──► READY ── asked to end, or a core died ──► STOPPING ── all cores gone ──► ENDED
    └──────────────────────────── the same ─────────────────────────────────►┘
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nbengine.config import EngineConfig
from nbengine.engine.leases import EndedLease, Lease, LeaseTable
from nbengine.ipc.messages import (
    Attach,
    AttachClient,
    Attached,
    ClientLost,
    ClientToHost,
    CoreToHost,
    Detach,
    DetachClient,
    EngineDead,
    EngineHandshakeMetadata,
    EngineReady,
    Heartbeat,
    HeartbeatAck,
    Hello,
    HostToClient,
    HostToCore,
    LeaseLost,
    Progress,
    Scaled,
    ScaleElasticEP,
    Shutdown,
    ShutdownEngine,
)

FIRST_ATTACH_GRACE = 60.0
"""Seconds that an engine waits at least for its first client, however short its `keep_alive`."""
STOP_GRACE = 2.0
"""Seconds that an engine core gets to end once it need not finish its requests; then it is killed."""


class HostPhase(enum.Enum):
    """Life of an engine, seen from its host."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ClientSpoke:
    """Event: a message came on the clients' socket."""

    identity: bytes
    message: ClientToHost


@dataclass(frozen=True, slots=True)
class CoreSpoke:
    """Event: a message came from an engine core."""

    rank: int
    message: CoreToHost


@dataclass(frozen=True, slots=True)
class CoreExited:
    """Event: an engine core's process is gone. `how` completes "engine core 0 (pid 1) …"; `clean`: status 0."""

    rank: int
    pid: int
    how: str
    clean: bool


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Event: somebody other than a client wants the engine to end now; `cause` says who or why."""

    cause: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Event: `HostState.next_deadline` may have come."""


Event = ClientSpoke | CoreSpoke | CoreExited | StopAsked | TimePassed


@dataclass(frozen=True, slots=True)
class ToClient:
    """Action: send a message to a client."""

    identity: bytes
    message: HostToClient


@dataclass(frozen=True, slots=True)
class ToCore:
    """Action: send a message to an engine core."""

    rank: int
    message: HostToCore


@dataclass(frozen=True, slots=True)
class SignalCores:
    """Action: send a signal to engine cores."""

    signal: signal.Signals
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class RemoveSockets:
    """Action: remove the socket files of a client that has left; ZMQ does not."""

    addresses: list[str]


@dataclass(frozen=True, slots=True)
class RemoveTensors:
    """Action: remove the tensors on their way to an engine core, but those of the clients in `live`."""

    live: frozenset[int]


@dataclass(frozen=True, slots=True)
class RecordReady:
    """Action: note in the connection file that the engines take requests."""

    engines: list[EngineReady]


@dataclass(frozen=True, slots=True)
class End:
    """Action, the last one: remove everything, tell the audience, exit."""

    notice: EngineDead
    audience: list[bytes]


Action = ToClient | ToCore | SignalCores | RemoveSockets | RemoveTensors | RecordReady | End


class HostState:
    """The host as a state machine. `alive(pid, create_time)` tells whether a client's process runs."""

    def __init__(
        self,
        config: EngineConfig,
        handshake: EngineHandshakeMetadata,
        alive: Callable[[int, float], bool],
        now: float,
    ) -> None:
        self.phase = HostPhase.STARTING
        self.leases = LeaseTable(config.lease, alive)
        self._ranks = list(range(config.parallel.data_parallel_size))
        self._keep_alive = None if config.bound else config.keep_alive
        self._handshake = handshake
        self._running = set(self._ranks)
        self._greeted: set[int] = set()
        self._leaving: set[int] = set()
        self._ready: dict[int, EngineReady] = {}
        self._progress: dict[int, Progress] = {}
        self._idle_deadline = self._idle_from(now, max(config.keep_alive, FIRST_ATTACH_GRACE))
        self._kill_at = math.inf
        self._draining = False
        self._notice: EngineDead | None = None
        self._askers: list[bytes] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (any monotonic clock) and return what to do."""
        match event:
            case ClientSpoke(identity, message):
                return self._on_client(identity, message, now)
            case CoreSpoke(rank, message):
                return self._on_core(rank, message, now)
            case CoreExited(rank, pid, how, clean):
                return self._on_core_exit(rank, f"engine core {rank} (pid {pid}) {how}", clean, now)
            case StopAsked(cause):
                return self._stop(EngineDead(cause=cause, expected=True), drain=False, now=now)
            case TimePassed():
                return self._on_time(now)

    def next_deadline(self) -> float:
        """When `TimePassed` is due, infinity if only another event can change anything."""
        lease = self.leases.next_deadline()
        return min(math.inf if lease is None else lease, self._idle_deadline, self._kill_at)

    def _on_client(self, identity: bytes, message: ClientToHost, now: float) -> list[Action]:
        match message:
            case Attach():
                return self._attach(identity, message, now)
            case Heartbeat():
                held = self.leases.renew(identity, now)
                return [ToClient(identity, HeartbeatAck() if held else LeaseLost("no lease is held here"))]
            case Detach():
                released = self.leases.release(identity)
                return [] if released is None else self._after_leases([released], now)
            case Shutdown(drain):
                self._askers.append(identity)
                notice = EngineDead(cause="the engine was shut down", expected=True)
                return self._stop(notice, drain=drain, now=now)
            case ScaleElasticEP():
                refusal = Scaled(len(self._ranks), "the number of engine cores cannot be changed yet")
                return [ToClient(identity, refusal)]

    def _attach(self, identity: bytes, attach: Attach, now: float) -> list[Action]:
        if self._notice is not None:
            return [ToClient(identity, self._notice)]
        lease, superseded = self.leases.grant(attach, identity, now)
        self._idle_deadline = math.inf
        actions = self._after_leases(superseded, now)
        actions.append(
            ToClient(identity, Attached(lease.client_index, self._ranks, self._handshake.tensor_dir))
        )
        news: Iterable[Progress | EngineReady] = self._progress.values()
        if self.phase is HostPhase.READY:
            news = self._ready.values()
        actions += [ToClient(identity, item) for item in news]
        return actions + [
            ToCore(rank, _introduction(lease)) for rank in sorted(self._greeted & self._running)
        ]

    def _on_core(self, rank: int, message: CoreToHost, now: float) -> list[Action]:
        match message:
            case Hello():
                self._greeted.add(rank)
                clients = [ToCore(rank, _introduction(lease)) for lease in self.leases.leases]
                return [ToCore(rank, self._handshake), *clients]
            case Progress():
                self._progress[rank] = message
                return self._to_all_clients(message)
            case EngineReady():
                return self._on_ready(rank, message)
            case ClientLost(client_index):
                lost = self.leases.drop(client_index, f"the connection to engine core {rank} broke")
                return [] if lost is None else self._after_leases([lost], now)
            case EngineDead():
                return self._on_core_dying(rank, message, now)

    def _on_ready(self, rank: int, message: EngineReady) -> list[Action]:
        self._ready[rank] = message
        if self.phase is not HostPhase.STARTING or len(self._ready) < len(self._ranks):
            return []
        self.phase = HostPhase.READY
        engines = [self._ready[rank] for rank in self._ranks]
        actions: list[Action] = [RecordReady(engines)]
        for engine in engines:
            actions += self._to_all_clients(engine)
        return actions

    def _on_core_dying(self, rank: int, notice: EngineDead, now: float) -> list[Action]:
        self._leaving.add(rank)
        if notice.expected and self._notice is not None:
            return []
        return self._stop(notice, drain=False, now=now)

    def _on_core_exit(self, rank: int, description: str, clean: bool, now: float) -> list[Action]:
        self._running.discard(rank)
        actions: list[Action] = []
        if self._notice is None or (self._draining and not clean):
            actions = self._stop(EngineDead(cause=description), drain=False, now=now)
        return actions + self._end_if_all_gone()

    def _stop(self, notice: EngineDead, *, drain: bool, now: float) -> list[Action]:
        cuts_drain_short = self._draining and not drain
        if self._notice is not None and not cuts_drain_short:
            return []
        started = self.phase is not HostPhase.STARTING
        if self._notice is None or not notice.expected:
            self._notice = notice
            notice.started = started
        orderly = started and notice.expected
        self.phase = HostPhase.STOPPING
        self._draining = drain and orderly
        self._idle_deadline = math.inf
        self._kill_at = math.inf if self._draining else now + STOP_GRACE
        ranks = sorted(self._running - self._leaving)
        if orderly:
            return [ToCore(rank, ShutdownEngine(drain)) for rank in ranks]
        return [SignalCores(signal.SIGTERM, ranks)] if ranks else []

    def _on_time(self, now: float) -> list[Action]:
        actions = self._after_leases(self.leases.expire(now), now)
        if self._idle_deadline <= now:
            cause = f"no client was attached for {self._keep_alive:g} s (keep_alive)"
            actions += self._stop(EngineDead(cause=cause, expected=True), drain=False, now=now)
        if self._kill_at <= now:
            self._kill_at = math.inf
            actions.append(SignalCores(signal.SIGKILL, sorted(self._running)))
        return actions

    def _after_leases(self, ended: list[EndedLease], now: float) -> list[Action]:
        actions: list[Action] = []
        for item in ended:
            actions.append(ToClient(item.lease.identity, LeaseLost(item.reason)))
            farewell = DetachClient(item.lease.client_index)
            actions += [ToCore(rank, farewell) for rank in sorted(self._greeted & self._running)]
            if item.final:
                actions.append(RemoveSockets([item.lease.input_address, item.lease.output_address]))
        if ended:
            actions.append(RemoveTensors(frozenset(lease.client_index for lease in self.leases.leases)))
        if ended and not self.leases and self._notice is None and self._keep_alive is not None:
            self._idle_deadline = self._idle_from(now, self._keep_alive)
        return actions

    def _idle_from(self, now: float, patience: float) -> float:
        return math.inf if self._keep_alive is None else now + patience

    def _to_all_clients(self, message: HostToClient) -> list[Action]:
        return [ToClient(lease.identity, message) for lease in self.leases.leases]

    def _end_if_all_gone(self) -> list[Action]:
        if self._running or self._notice is None or self.phase is HostPhase.ENDED:
            return []
        self.phase = HostPhase.ENDED
        attached = [lease.identity for lease in self.leases.leases]
        return [End(self._notice, list(dict.fromkeys(attached + self._askers)))]


def _introduction(lease: Lease) -> AttachClient:
    return AttachClient(lease.client_index, lease.input_address, lease.output_address)
