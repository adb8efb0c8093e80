"""What the host decides: events in, actions out, no I/O and no clock of its own.

STARTING ── every core READY ──► READY ── asked to end, or a core died ──► STOPPING ── all cores gone ──► ENDED
    └──────────────────────────── the same ─────────────────────────────────►┘

A core among independent ones that dies while another takes requests is started again instead; see `RankTable`.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Callable, Iterable

import msgspec

from nbengine.config import EngineConfig
from nbengine.engine.host_events import (
    Action,
    ClientSpoke,
    CoreExited,
    CoreReady,
    CoreSpoke,
    End,
    Event,
    ForgetStats,
    RecordReady,
    RemoveSockets,
    RemoveTensors,
    SignalCores,
    StartCore,
    StartFailed,
    StopAsked,
    TimePassed,
    ToClient,
    ToCore,
)
from nbengine.engine.leases import EndedLease, Lease, LeaseTable
from nbengine.engine.rank_table import RankLife, RankPhase, RankTable
from nbengine.engine.scaling import STOP_GRACE, LockStep, Scaler
from nbengine.ipc.control_messages import (
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
    EngineLost,
    EngineReady,
    GroupChanged,
    Heartbeat,
    HeartbeatAck,
    Hello,
    HostToClient,
    LeaseLost,
    Progress,
    RanksChanged,
    Scaled,
    ScaleElasticEP,
    Shutdown,
    ShutdownEngine,
)

FIRST_ATTACH_GRACE = 60.0
"""Seconds that an engine waits at least for its first client, however short its `keep_alive`."""


class HostPhase(enum.Enum):
    """Life of an engine, seen from its host."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"


class HostState:
    """The host as a state machine. `alive(pid, create_time)` tells whether a client's process runs; `lock_step` is None
    for independent engine cores."""

    def __init__(
        self,
        config: EngineConfig,
        handshake: EngineHandshakeMetadata,
        alive: Callable[[int, float], bool],
        now: float,
        lock_step: LockStep | None = None,
    ) -> None:
        self.phase = HostPhase.STARTING
        self.leases = LeaseTable(config.lease, alive)
        self._table = RankTable(config.parallel.data_parallel_size)
        self._in_lock_step = lock_step is not None
        self._scaler = Scaler(self._table, lock_step, self._announce_ranks)
        self._keep_alive = None if config.bound else config.keep_alive
        self._handshake = handshake
        self._idle_deadline = self._idle_from(now, max(config.keep_alive, FIRST_ATTACH_GRACE))
        self._kill_at = math.inf
        self._draining = False
        self._notice: EngineDead | None = None
        self._askers: list[bytes] = []

    def begin(self) -> list[Action]:
        """Return what to do before any event."""
        return [StartCore(life.rank, life.incarnation) for life in self._table.all()]

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (any monotonic clock) and return what to do."""
        match event:
            case ClientSpoke(identity, message):
                return self._on_client(identity, message, now)
            case CoreSpoke(rank, message):
                return self._on_core(self._table[rank], message, now)
            case CoreExited(rank, pid, how, clean, tail):
                cause = f"engine core {rank} (pid {pid}) {how}"
                return self._on_core_exit(self._table[rank], EngineDead(cause, tail), clean, now)
            case StartFailed(rank, cause):
                return self._on_core_exit(self._table[rank], EngineDead(cause), clean=False, now=now)
            case StopAsked(cause):
                return self._stop(EngineDead(cause=cause, expected=True), drain=False, now=now)
            case TimePassed():
                return self._on_time(now)

    def next_deadline(self) -> float:
        """When `TimePassed` is due, infinity if only another event can change anything."""
        lease = self.leases.next_deadline()
        due = min(self._idle_deadline, self._kill_at, self._table.next_deadline())
        return due if lease is None else min(lease, due)

    # Clients.

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
            case ScaleElasticEP(size):
                return self._scale(identity, size, now)

    def _attach(self, identity: bytes, attach: Attach, now: float) -> list[Action]:
        if self._notice is not None:
            return [ToClient(identity, self._notice)]
        lease, superseded = self.leases.grant(attach, identity, now)
        self._idle_deadline = math.inf
        actions = self._after_leases(superseded, now)
        starting = self.phase is HostPhase.STARTING
        ranks = self._table.running if starting else self._table.ready
        actions.append(ToClient(identity, Attached(lease.client_index, ranks, self._handshake.tensor_dir)))
        news: Iterable[Progress | EngineReady] = self._table.ready_messages()
        if starting:
            news = [life.progress for life in self._table.all() if life.progress is not None]
        actions += [ToClient(identity, item) for item in news]
        return actions + [ToCore(rank, _introduction(lease)) for rank in self._table.welcoming]

    def _after_leases(self, ended: list[EndedLease], now: float) -> list[Action]:
        actions: list[Action] = []
        for item in ended:
            actions.append(ToClient(item.lease.identity, LeaseLost(item.reason)))
            farewell = DetachClient(item.lease.client_index)
            actions += [ToCore(rank, farewell) for rank in self._table.hearing]
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

    # Engine cores.

    def _on_core(self, life: RankLife, message: CoreToHost, now: float) -> list[Action]:
        if isinstance(message, Hello):
            return self._greet(life)
        if isinstance(message, ClientLost):
            reason = f"the connection to engine core {life.rank} broke"
            lost = self.leases.drop(message.client_index, reason)
            return [] if lost is None else self._after_leases([lost], now)
        if not (life.greeted and life.is_unaware):
            # Of a process that is gone, or told to go.
            return []
        match message:
            case Progress():
                life.progress = message
                return self._to_all_clients(message)
            case EngineReady():
                return self._on_ready(life, message, now)
            case GroupChanged(after=size):
                return self._scaler.group_changed(life.rank, size)
            case EngineDead():
                return self._on_core_dying(life, message, now)

    def _greet(self, life: RankLife) -> list[Action]:
        if life.phase is not RankPhase.STARTING:
            return []
        life.greeted = True
        handshake = msgspec.structs.replace(
            self._handshake,
            incarnation=life.incarnation,
            data_parallel_size=self._table.size,
            joins_later=self._in_lock_step and self.phase is HostPhase.READY,
        )
        clients = [ToCore(life.rank, _introduction(lease)) for lease in self.leases.leases]
        return [ToCore(life.rank, handshake), *clients]

    def _on_ready(self, life: RankLife, message: EngineReady, now: float) -> list[Action]:
        if message.incarnation != life.incarnation or life.phase is not RankPhase.STARTING:
            return []
        life.become_ready(message, now)
        if self.phase is HostPhase.READY:
            return [CoreReady(life.rank), *self._scaler.newcomer_is_ready(life)]
        if self._table.ready != self._table.running:
            return []
        self.phase = HostPhase.READY
        engines = self._table.ready_messages()
        actions: list[Action] = [RecordReady(engines, self._table.size)]
        for engine in engines:
            actions += [CoreReady(engine.rank), *self._to_all_clients(engine)]
        return actions

    def _announce_ranks(self, newcomers: list[int]) -> list[Action]:
        engines = self._table.ready_messages()
        actions: list[Action] = [RecordReady(engines, self._table.size)]
        for engine in engines:
            if engine.rank in newcomers:
                actions += self._to_all_clients(engine)
        return actions + self._to_all_clients(RanksChanged(self._table.ready))

    def _on_core_dying(self, life: RankLife, notice: EngineDead, now: float) -> list[Action]:
        if self._notice is None:
            return self._lose(life, notice, now)
        life.die(math.inf)
        return [] if notice.expected else self._stop(notice, drain=False, now=now)

    def _on_core_exit(self, life: RankLife, notice: EngineDead, clean: bool, now: float) -> list[Action]:
        actions: list[Action] = []
        is_surprise = life.phase is not RankPhase.DYING
        has_left = life.phase is RankPhase.LEAVING and clean
        if self._notice is None and is_surprise and not has_left:
            actions = self._lose(life, notice, now)
            life.end(now)
        else:
            life.end(now)
            if self._draining and is_surprise and not clean:
                actions = self._stop(notice, drain=False, now=now)
        actions.append(ForgetStats(life.rank))
        return actions + self._scaler.has_left(life.rank) + self._end_if_all_gone()

    def _lose(self, life: RankLife, notice: EngineDead, now: float) -> list[Action]:
        """A core dies: the engine with it, or it alone."""
        is_last = self._table.ready == [life.rank]
        if self.phase is HostPhase.STARTING or is_last or not self._scaler.can_do_without(life.rank):
            life.die(math.inf)
            return self._stop(notice, drain=False, now=now)
        was_ready = life.phase is RankPhase.READY
        life.count_death(now)
        life.die(now + STOP_GRACE)
        actions = self._scaler.newcomer_failed(life, notice.cause, now)
        if actions is not None:
            # No client has heard of it.
            return actions
        lost = EngineLost(life.rank, life.incarnation, notice.cause, notice.log_tail, life.wanted)
        return (self._announce_ranks([]) if was_ready else []) + self._to_all_clients(lost)

    def _scale(self, identity: bytes, size: int, now: float) -> list[Action]:
        if self.phase is HostPhase.STARTING:
            error: str | None = "the engine is being started"
        elif self._notice is not None:
            error = f"the engine is ending: {self._notice.cause}"
        else:
            error = self._scaler.refusal(size)
        if error is None:
            return self._scaler.begin(identity, size, now)
        return [ToClient(identity, Scaled(len(self._table.members), error))]

    # Time and the end.

    def _on_time(self, now: float) -> list[Action]:
        actions = self._after_leases(self.leases.expire(now), now)
        if self._idle_deadline <= now:
            cause = f"no client was attached for {self._keep_alive:g} s (keep_alive)"
            actions += self._stop(EngineDead(cause=cause, expected=True), drain=False, now=now)
        for life in self._table.due_restarts(now):
            life.start()
            actions.append(StartCore(life.rank, life.incarnation))
        late = self._table.take_due_kills(now)
        if self._kill_at <= now:
            self._kill_at = math.inf
            late = self._table.running
        if late:
            actions.append(SignalCores(signal.SIGKILL, late))
        return actions

    def _stop(self, notice: EngineDead, *, drain: bool, now: float) -> list[Action]:
        cuts_drain_short = self._draining and not drain
        if self.phase is HostPhase.ENDED or (self._notice is not None and not cuts_drain_short):
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
        unanswered = self._scaler.cancel()
        if unanswered is not None:
            self._askers.append(unanswered)
        return self._end_cores(ShutdownEngine(drain) if orderly else None, now)

    def _end_cores(self, farewell: ShutdownEngine | None, now: float) -> list[Action]:
        """Ask the cores to end; those that cannot be asked, or all without a `farewell`, get a signal."""
        self._table.dismiss_from(0)
        asked = [] if farewell is None else self._table.ranks(RankPhase.LEAVING)
        signalled = [rank for rank in self._table.unaware if rank not in asked]
        for rank in signalled:
            self._table[rank].die(now + STOP_GRACE)
        actions: list[Action] = [ToCore(rank, farewell) for rank in asked if farewell is not None]
        return actions + ([SignalCores(signal.SIGTERM, signalled)] if signalled else [])

    def _end_if_all_gone(self) -> list[Action]:
        if self._table.running or self._notice is None or self.phase is HostPhase.ENDED:
            return []
        self.phase = HostPhase.ENDED
        attached = [lease.identity for lease in self.leases.leases]
        return [End(self._notice, list(dict.fromkeys(attached + self._askers)))]


def _introduction(lease: Lease) -> AttachClient:
    return AttachClient(lease.client_index, lease.input_address, lease.output_address)
