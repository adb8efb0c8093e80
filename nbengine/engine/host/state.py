"""The decisions of the host: events in, actions out, no I/O, and no clock.

STARTING ── every core READY ──► READY ─ asked to end, or a core died ──► STOPPING ── all cores gone ──► ENDED
    └──────────────────────────── the same ────────────────────────────────►┘

A core among independent ones that dies while another takes requests is started again instead; see
`RankTable`.
"""

from __future__ import annotations

import enum
import math
import signal
import sys
from collections.abc import Callable

import msgspec

from nbengine.config import EngineConfig
from nbengine.engine.host.events import (
    Action,
    ClientSpoke,
    CoreExited,
    CoreReady,
    CoreSpoke,
    End,
    Event,
    ForgetStats,
    HostStood,
    RecordFailed,
    RecordReady,
    RemoveSockets,
    RemoveTensors,
    SignalCores,
    StacksGathered,
    StartCore,
    StartFailed,
    StopAsked,
    TellHistory,
    TimePassed,
    ToClient,
    ToCore,
)
from nbengine.engine.host.leases import FIRST_CLIENT, EndedLease, Lease, LeaseTable
from nbengine.engine.host.progress_guard import ProgressGuard
from nbengine.engine.host.progress_watch import Look
from nbengine.engine.host.rank_table import RankLife, RankPhase, RankTable
from nbengine.engine.host.scaling import STOP_GRACE, LacksRoom, LockStep, Scaler
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
    Pulse,
    RanksChanged,
    ReadHistory,
    Scaled,
    ScaleElasticEP,
    Shutdown,
    ShutdownEngine,
)
from nbengine.ipc.liveness import ProcessIdentity, ProcessState
from nbengine.ipc.protocol import PROTOCOL

FIRST_ATTACH_GRACE = 60.0
"""Least seconds that an engine waits for its first client, however short its `keep_alive`."""
FIRST_WORDS_GRACE = 2.0
"""Seconds that a start which has failed waits for a client that it can tell why."""
MAX_ASKERS = 1000
"""Most connections without a lease that are told of the end for which they have asked."""

RECORD_PAUSE = 2.0
"""Seconds until the next attempt to write a connection file that could not be written."""


class HostPhase(enum.Enum):
    """The phases of an engine's life, as its host sees them."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"


class HostState:
    """The host as a state machine.

    `process_state` returns the state of a client's process, `look(rank)` that of an engine core's process;
    `lock_step` is None for independent engine cores; `lacks_room` is asked before a scaling.

    At most `max_starting` engine cores start at a time. Only `TimePassed` starts one, and only one at once,
    so that the caller can look before every start whether the engine is to end.
    """

    def __init__(
        self,
        config: EngineConfig,
        handshake: EngineHandshakeMetadata,
        process_state: Callable[[ProcessIdentity], ProcessState],
        now: float,
        lock_step: LockStep | None = None,
        look: Look = lambda _: ProcessState.RUNNING,
        max_starting: int = sys.maxsize,
        lacks_room: LacksRoom = lambda before, after: None,  # noqa: ARG005
    ) -> None:
        self.phase = HostPhase.STARTING
        self.leases = LeaseTable(config.lease, process_state)
        self._in_lock_step = lock_step is not None
        self._table = RankTable(
            config.parallel.data_parallel_size, max_starting, until_hello=self._in_lock_step
        )
        self._guard = ProgressGuard(
            self._table,
            config.progress_deadlines,
            look,
            self._to_all_clients,
            in_lock_step=self._in_lock_step,
        )
        self._scaler = Scaler(self._table, lock_step, self._announce_ranks, lacks_room)
        self._keep_alive = None if config.bound else config.keep_alive
        self._handshake = handshake
        self._idle_deadline = self._idle_from(now, max(config.keep_alive, FIRST_ATTACH_GRACE))
        self._kill_at = math.inf
        self._record_at = math.inf
        self._tell_until = math.inf
        self._may_wait_to_tell = True
        self._draining = False
        self._notice: EngineDead | None = None
        self._askers: dict[bytes, None] = {}
        """The first `MAX_ASKERS` connections that have asked for the end, in their order."""
        self._next_deadline: float | None = None
        """None where an event may have changed it since it was computed."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (any monotonic clock, never negative) and return what to do."""
        self._next_deadline = None
        actions = self._take_in(event, now)
        return actions + self._start_next(now) if isinstance(event, TimePassed) else actions

    def _start_next(self, now: float) -> list[Action]:
        life = self._table.next_start()
        if life is None:
            return []
        life.start()
        self._guard.begin(life.rank, now)
        return [StartCore(life.rank, life.incarnation)]

    def _take_in(self, event: Event, now: float) -> list[Action]:
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
                stopping = self._stop(EngineDead(cause=cause, expected=True), drain=False, now=now)
                return stopping + self._wait_no_longer(now)
            case HostStood(seconds):
                self._guard.excuse(seconds, now)
                # The cores may have had no time to end, either.
                self._kill_at += seconds
                self._table.excuse(seconds)
                return []
            case StacksGathered(rank, incarnation, stacks):
                return self._end_overdue(self._table[rank], incarnation, stacks, now)
            case RecordFailed():
                # An engine that starts writes the file when it is ready, one that ends removes it.
                self._record_at = now + RECORD_PAUSE if self.phase is HostPhase.READY else math.inf
                return []
            case TimePassed():
                return self._on_time(now)

    def next_deadline(self) -> float:
        """Return when `TimePassed` is due, 0 for at once, infinity if only another event changes anything."""
        if self._next_deadline is None:
            lease = self.leases.next_deadline()
            self._next_deadline = min(
                self._idle_deadline,
                self._kill_at,
                self._record_at,
                self._tell_until,
                self._table.next_deadline(),
                self._guard.next_deadline(),
                math.inf if lease is None else lease,
            )
        return self._next_deadline

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
                self._remember_asker(identity)
                notice = EngineDead(cause="the engine was shut down", expected=True)
                stopping = self._stop(notice, drain=drain, now=now)
                return stopping + (self._wait_no_longer(now) if self._tell_until < math.inf else [])
            case ScaleElasticEP(size):
                return self._scale(identity, size, now)
            case ReadHistory():
                return [TellHistory(identity, message)]

    def _attach(self, identity: bytes, attach: Attach, now: float) -> list[Action]:
        if self._notice is not None:
            if self._tell_until < math.inf:
                self._remember_asker(identity)
                return self._wait_no_longer(now)
            return [ToClient(identity, self._notice)]
        lease, superseded = self.leases.grant(attach, identity, now)
        self._idle_deadline = math.inf
        actions = self._after_leases(superseded, now)
        starting = self.phase is HostPhase.STARTING
        ranks = self._table.coming if starting else self._table.ready
        actions.append(
            ToClient(identity, Attached(lease.client_index, ranks, self._handshake.tensor_dir, PROTOCOL))
        )
        news: list[HostToClient] = [] if starting else [*self._table.ready_messages()]
        if starting or lease.client_index == FIRST_CLIENT:
            # Who has started the engine waits for it, and may attach when some stages, or all, are over.
            news = [*self._table.start_reports(), *news]
        actions += [ToClient(identity, item) for item in (*news, *self._guard.news(now))]
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
            # The message is from a process that is gone, or has been told to end.
            return []
        match message:
            case Pulse():
                return self._guard.on_pulse(life, message, now)
            case Progress():
                life.take_report(message)
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
        self._guard.loaded(life.rank, now)
        if self.phase is HostPhase.READY:
            return [CoreReady(life.rank), *self._scaler.newcomer_is_ready(life)]
        if self._table.ready != self._table.coming:
            return []
        self.phase = HostPhase.READY
        engines = self._table.ready_messages()
        actions = self._record()
        for engine in engines:
            actions += [CoreReady(engine.rank), *self._to_all_clients(engine)]
        return actions

    def _announce_ranks(self, newcomers: list[int]) -> list[Action]:
        engines = self._table.ready_messages()
        actions = self._record()
        for engine in engines:
            if engine.rank in newcomers:
                actions += self._to_all_clients(engine)
        return actions + self._to_all_clients(RanksChanged(self._table.ready))

    def _record(self) -> list[Action]:
        """Record the ranks that take requests; an attempt that failed before is superseded."""
        self._record_at = math.inf
        return [RecordReady(self._table.ready_messages(), self._table.size)]

    def _on_core_dying(self, life: RankLife, notice: EngineDead, now: float) -> list[Action]:
        if self._notice is None:
            return self._lose(life, notice, now)
        life.die(math.inf)
        return [] if notice.expected else self._stop(notice, drain=False, now=now)

    def _on_core_exit(self, life: RankLife, notice: EngineDead, clean: bool, now: float) -> list[Action]:
        actions: list[Action] = []
        self._guard.forget(life.rank)
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
        return actions + self._scaler.has_left(life.rank) + self._end_if_all_gone(now)

    def _lose(self, life: RankLife, notice: EngineDead, now: float) -> list[Action]:
        """Lose a core that dies: the engine ends with it, or the core alone."""
        is_last = self._table.ready == [life.rank]
        if self.phase is HostPhase.STARTING or is_last or not self._scaler.can_do_without(life.rank):
            life.die(math.inf)
            return self._stop(notice, drain=False, now=now)
        was_ready = life.phase is RankPhase.READY
        life.count_death(now)
        life.die(now + STOP_GRACE)
        actions = self._scaler.newcomer_failed(life, notice.cause, now)
        if actions is not None:
            # No client has heard of the newcomer.
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

    def _end_overdue(self, life: RankLife, incarnation: int, stacks: str, now: float) -> list[Action]:
        notice = self._guard.conclude(life, incarnation, stacks)
        if notice is None:
            return []
        # A core that stands would not read a message that tells it to end.
        return [*self._on_core_dying(life, notice, now), SignalCores(signal.SIGKILL, [life.rank])]

    # Time and the end.

    def _on_time(self, now: float) -> list[Action]:
        actions = self._guard.judge(now) + self._after_leases(self.leases.expire(now), now)
        if self._idle_deadline <= now:
            cause = f"no client was attached for {self._keep_alive:g} s (keep_alive)"
            actions += self._stop(EngineDead(cause=cause, expected=True), drain=False, now=now)
        if self._tell_until <= now:
            actions += self._wait_no_longer(now)
        if self._record_at <= now:
            actions += self._record()
        for life in self._table.due_restarts(now):
            life.queue()
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
        # A failure in the middle of an orderly end is the cause that clients are told.
        if self._notice is None or not notice.expected:
            self._notice = notice
            notice.started = started
        orderly = started and notice.expected
        self.phase = HostPhase.STOPPING
        self._draining = drain and orderly
        self._idle_deadline = self._record_at = math.inf
        # A drain may last as long as its requests do.
        self._kill_at = math.inf if self._draining else now + STOP_GRACE
        unanswered = self._scaler.cancel()
        if unanswered is not None:
            self._remember_asker(unanswered)
        actions = self._end_cores(ShutdownEngine(drain) if orderly else None, now)
        return actions + self._end_if_all_gone(now)

    def _remember_asker(self, identity: bytes) -> None:
        if len(self._askers) < MAX_ASKERS:
            self._askers[identity] = None

    def _end_cores(self, farewell: ShutdownEngine | None, now: float) -> list[Action]:
        """Ask the cores to end; those that cannot be asked, or all without a `farewell`, get a signal."""
        self._table.dismiss_from(0)
        asked = [] if farewell is None else self._table.ranks(RankPhase.LEAVING)
        signalled = [rank for rank in self._table.unaware if rank not in asked]
        for rank in signalled:
            self._table[rank].die(now + STOP_GRACE)
        actions: list[Action] = [ToCore(rank, farewell) for rank in asked if farewell is not None]
        return actions + ([SignalCores(signal.SIGTERM, signalled)] if signalled else [])

    def _end_if_all_gone(self, now: float) -> list[Action]:
        if self._table.running or self._notice is None or self.phase is HostPhase.ENDED:
            return []
        attached = [lease.identity for lease in self.leases.leases]
        told = list(dict.fromkeys([*attached, *self._askers]))
        has_failed = not (self._notice.started or self._notice.expected)
        if has_failed and not told and self._may_wait_to_tell:
            # Who has started this engine may be about to attach, and would see no more than the end of a process.
            self._tell_until = min(self._tell_until, now + FIRST_WORDS_GRACE)
            return []
        self.phase = HostPhase.ENDED
        return [End(self._notice, told)]

    def _wait_no_longer(self, now: float) -> list[Action]:
        """End the wait for a client that a failed start could tell why."""
        self._may_wait_to_tell, self._tell_until = False, math.inf
        return self._end_if_all_gone(now)


def _introduction(lease: Lease) -> AttachClient:
    return AttachClient(lease.client_index, lease.input_address, lease.output_address, lease.secret)
