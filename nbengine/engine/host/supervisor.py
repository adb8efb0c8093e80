"""The host process, which starts the engine cores, keeps the leases, publishes the statistics and cleans up.

`HostState` decides; this module has the sockets, the processes and the one poll loop around it.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Collection

import msgspec
import zmq

from nbengine.engine.host.connection_record import ConnectionRecord
from nbengine.engine.host.events import (
    Action,
    ClientSpoke,
    CoreExited,
    CoreReady,
    CoreSpoke,
    End,
    Event,
    ForgetStats,
    GatherStacks,
    HostStood,
    RecordFailed,
    RecordReady,
    RecordStalled,
    RemoveSockets,
    RemoveTensors,
    ResizeCoordinator,
    SignalCores,
    StartCore,
    StartFailed,
    StopAsked,
    TellHistory,
    TimePassed,
    ToClient,
    ToCore,
)
from nbengine.engine.host.inbox import Inbox
from nbengine.engine.host.launchers import core_launcher
from nbengine.engine.host.lock_step import lock_step_of
from nbengine.engine.host.parent_watch import ParentWatch
from nbengine.engine.host.progress_watch import OwnTurns
from nbengine.engine.host.signal_pipe import SignalPipe
from nbengine.engine.host.sockets import HostSockets, handshake_of
from nbengine.engine.host.stacks import StackRequests
from nbengine.engine.host.state import HostState
from nbengine.errors import EngineStartError, NBEngineError, ProtocolMismatchError, WireError
from nbengine.ipc.control_messages import ClientToHost, CoreToHost, EngineDead
from nbengine.ipc.doorkeeper import Doorkeeper
from nbengine.ipc.handshake import ControlDecoder, encode_control, refusal_for
from nbengine.ipc.liveness import ProcessState, state_of
from nbengine.ipc.messages import engine_identity, rank_of_peer
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.protocol import engine_mismatch
from nbengine.ipc.shm_tensors import remove_abandoned
from nbengine.ipc.shortage import RESERVE, DescriptorReserve, Setbacks, check_room, is_shortage, persist
from nbengine.ipc.sockets import IPC_PREFIX
from nbengine.ipc.transport import bound_address
from nbengine.runtime.capacity import Capacity, max_starting
from nbengine.runtime.connection import (
    ConnectionInfo,
    remove_engine_files,
)
from nbengine.runtime.directories import remove_client_socket
from nbengine.runtime.processes import END_SIGNALS, CoreHandle, take_end_signals
from nbengine.runtime.spare import SpareProcess

logger = logging.getLogger(__name__)

PARENT_INTERVAL = 1.0
"""Seconds between two looks at whether a bound engine's parent still runs: a process that the parent has
forked holds the pipe open, and there may be no pipe."""
LAST_WORDS_LOOKS, LAST_WORDS_LOOK_MS = 10, 10
"""Looks for a message of an engine core that may be under way when its process is already gone."""
LONGEST_LAST_WORDS = 1.0
"""Seconds after which they end though other engine cores go on sending messages."""
LAST_MESSAGE_LINGER_MS = 1000
DOOR_INTERVAL = 0.5
START_PATIENCE = 10.0
"""Seconds for which the start of a core is tried again after a shortage, as of processes."""
REMOVE_PATIENCE = 5.0
"""Seconds for which the removal of the engine's files is tried again while there are no descriptors for
it."""
LONGEST_TURN = 86400.0
"""Seconds after which the host looks whether there is anything to do though nothing is due."""
KILLED_WAIT = 5.0
"""Seconds that a killed process may take to be gone."""


class Supervisor:
    """The supervisor, which does the host's I/O around a `HostState`."""

    def __init__(self, info: ConnectionInfo, spare: SpareProcess | None = None) -> None:
        self.info = info
        self._signals = SignalPipe((*END_SIGNALS, signal.SIGCHLD))
        take_end_signals()
        sockets = HostSockets(info)
        self._context = sockets.context
        self._clients = sockets.clients
        self._core_control = sockets.cores
        self._coordinator = sockets.coordinator
        self._metrics = sockets.metrics
        self._state = HostState(
            info.config,
            handshake_of(info),
            state_of,
            time.monotonic(),
            lock_step_of(info),
            self._state_of_core,
            max_starting(info.config.parallel),
            self._lacks_room,
        )
        self._stacks = StackRequests(info.log_path, info.config.parallel.world_size)
        self._turns = OwnTurns(time.monotonic())
        self._launcher = core_launcher(info, self._signals.wake, spare)
        self._cores: dict[int, CoreHandle] = {}
        self._start_by: dict[int, float] = {}
        """By rank, the time on the monotonic clock at which to give up a start that met a shortage."""
        self._listening: set[int] = set()
        self._spoken: set[int] = set()
        """The ranks whose cores have said why they end."""
        self._events: deque[Event] = deque()
        self._record = ConnectionRecord(info)
        self._client_decoder: ControlDecoder[ClientToHost] = ControlDecoder(ClientToHost)
        self._core_decoder: ControlDecoder[CoreToHost] = ControlDecoder(CoreToHost)
        self._poller = zmq.Poller()
        self._parent = ParentWatch(self._poller) if info.config.bound else None
        self._end: End | None = None
        self._setbacks = Setbacks(logger, "the host falters")
        self._postponed: list[Action] = []
        """Actions that met a shortage, to be tried again."""
        self._retry_at = math.inf
        self._door = Doorkeeper(
            map(bound_address, (self._clients, self._core_control, *self._coordinator.sockets))
        )
        self._look_at_door_at = 0.0
        self._reserve = DescriptorReserve()
        self._peer_log = PeerLog(logger)
        self._from_clients = Inbox(self._clients, self._peer_log)
        self._from_cores = Inbox(self._core_control, self._peer_log, most_a_second=math.inf)

    def run(self) -> EngineDead:
        """Run the engine to its end and return what the clients were told about it."""
        for source in (self._clients, self._core_control):
            self._poller.register(source, zmq.POLLIN)
        self._coordinator.register(self._poller)
        self._poller.register(self._signals.fileno(), zmq.POLLIN)
        # It looks for an order to end before it starts anything: one may have come in the meantime.
        while self._end is None:
            try:
                self._poll_once()
            except (OSError, zmq.ZMQError, NBEngineError) as error:
                time.sleep(self._setbacks.note(error))
        return self._end.notice

    def close(self, notice: EngineDead) -> None:
        """End what still runs, remove the engine's files, and only then tell the clients."""
        for core in self._cores.values():
            core.close()
        for core in self._cores.values():
            try:
                core.wait(KILLED_WAIT)
            except TimeoutError as error:
                # The core's machine may be gone.
                logger.warning("%s", error)
        self._launcher.close()
        if self._metrics is not None:
            self._metrics.close()
        self._remove_files()
        audience = {lease.identity for lease in self._state.leases.leases}
        if self._end is not None:
            audience.update(self._end.audience)
        # Clients whose messages came too late to be handled are told as well.
        audience.update(identity for identity, _ in self._from_clients.read(time.monotonic()))
        for identity in audience:
            self._send(self._clients, identity, notice)
        self._clients.close(linger=LAST_MESSAGE_LINGER_MS)
        self._core_control.close()
        self._coordinator.close()
        self._context.term()

    # The poll loop.

    def _poll_once(self) -> None:
        timeout_ms = self._timeout_ms(self._turns.last)
        ready = {source for source, _ in self._poller.poll(timeout_ms)}
        now = time.monotonic()
        self._note_own_gap(timeout_ms, now)
        if self._core_control in ready:
            self._read(self._from_cores, self._read_core)
        if self._clients in ready:
            self._read(self._from_clients, self._read_client)
        self._coordinator.process(ready, now)
        for wish in self._coordinator.take_wishes(now):
            self._tell_cores(wish)
        if self._signals.fileno() in ready:
            self._on_signals()
        if self._parent is not None and self._parent.ended(ready):
            self._feed(StopAsked("the process that started it has ended"))
        for gathered in self._stacks.take(now):
            self._feed(gathered)
        if now >= self._retry_at:
            self._retry()
        if now >= self._look_at_door_at:
            # Only when something else wakes this process: it has room for tens of thousands of connections.
            self._look_at_door_at = now + DOOR_INTERVAL
            self._door.look()
        if self._state.next_deadline() <= now:
            self._feed(TimePassed())

    def _timeout_ms(self, now: float) -> int | None:
        deadline = min(
            self._state.next_deadline(), self._coordinator.deadline, self._stacks.deadline, self._retry_at
        )
        if self._parent is not None:
            deadline = min(deadline, now + PARENT_INTERVAL)
        if deadline == math.inf:
            return None
        # A poll takes no more milliseconds than 31 bits hold.
        return max(0, math.ceil(min(deadline - now, LONGEST_TURN) * 1000))

    def _note_own_gap(self, timeout_ms: int | None, now: float) -> None:
        gap = self._turns.gap(math.inf if timeout_ms is None else timeout_ms / 1000, now)
        if gap:
            logger.warning("the host did not run for %.1f s", gap)
            self._coordinator.state.history.stood(gap, now)
            self._feed(HostStood(gap))

    def _feed(self, event: Event) -> None:
        self._perform_all(self._state.handle(event, time.monotonic()))

    def _perform_all(self, actions: list[Action]) -> None:
        """Carry out actions, and what follows from their failures."""
        for action in actions:
            self._try_to_perform(action)
        while self._events:
            self._feed(self._events.popleft())

    def _try_to_perform(self, action: Action) -> None:
        try:
            self._perform(action)
        except (OSError, zmq.ZMQError, NBEngineError) as error:
            self._retry_at = time.monotonic() + self._setbacks.note(error)
            self._postponed.append(action)

    def _give_up_starting(self, ranks: Collection[int]) -> None:
        """Report cores as failed that are to end before they could be started."""
        for action in list(self._postponed):
            if isinstance(action, StartCore) and action.rank in ranks:
                self._postponed.remove(action)
                self._start_by.pop(action.rank, None)
                cause = f"engine core {action.rank} was to end before there was room for its process"
                self._events.append(StartFailed(action.rank, cause))

    def _retry(self) -> None:
        postponed, self._postponed = self._postponed, []
        self._retry_at = math.inf
        self._perform_all(postponed)

    def _perform(self, action: Action) -> None:
        match action:
            case ToClient(identity, message):
                self._send(self._clients, identity, message)
            case ToCore(rank, message):
                self._tell_core(rank, message)
            case StartCore(rank, incarnation):
                self._start_core(rank, incarnation)
            case SignalCores(number, ranks):
                self._give_up_starting(ranks)
                for rank in self._cores.keys() & set(ranks):
                    self._cores[rank].send_signal(number)
            case GatherStacks(rank):
                if rank in self._cores:
                    self._stacks.ask(self._cores[rank], time.monotonic())
            case RecordStalled(ranks):
                self._note_record(self._record.note_stalled(ranks))
            case RemoveSockets(addresses):
                for address in addresses:
                    self._remove_socket(address)
            case RemoveTensors(live):
                if self.info.tensor_dir:
                    remove_abandoned(self.info.tensor_dir, live)
            case RecordReady(engines, size):
                self._note_record(self._record.note_ready(engines, size))
            case CoreReady(rank):
                self._listening.add(rank)
                for wish in self._coordinator.standing_wishes:
                    self._tell_core(rank, wish)
            case ForgetStats(rank):
                self._coordinator.state.forget(rank, time.monotonic())
            case TellHistory(identity, asked):
                history = self._coordinator.state.history
                self._send(self._clients, identity, history.read(asked, time.monotonic()))
            case ResizeCoordinator(size):
                self._coordinator.state.scale(size)
            case End():
                self._end = action

    def _note_record(self, is_written: bool) -> None:
        if not is_written:
            self._events.append(RecordFailed())

    # Messages.

    def _send(self, router: zmq.Socket[bytes], identity: bytes, message: msgspec.Struct) -> None:
        # A ROUTER drops messages to a peer that is gone, which is what we want.
        router.send_multipart([identity, encode_control(message)])

    def _tell_cores(self, message: msgspec.Struct) -> None:
        for rank in self._listening:
            self._tell_core(rank, message)

    def _tell_core(self, rank: int, message: msgspec.Struct) -> None:
        if rank in self._cores:
            self._send(self._core_control, engine_identity(rank, self._cores[rank].secret), message)

    def _read(self, inbox: Inbox, read: Callable[[bytes, bytes], None]) -> None:
        for identity, frames in inbox.read(time.monotonic()):
            try:
                if len(frames) != 1:
                    raise WireError(f"a control message has one frame, this one has {len(frames)}")
                read(identity, frames[0])
            except WireError as error:
                # The rest of an engine core's identity is a secret.
                self._peer_log.warn_of(identity, "dropped a message from %s: %s", identity[:6], error)

    def _read_client(self, identity: bytes, frame: bytes) -> None:
        try:
            message = self._client_decoder.decode(frame)
        except ProtocolMismatchError as error:
            self._send(self._clients, identity, refusal_for(f"engine {self.info.name}", error.theirs))
            raise
        self._feed(ClientSpoke(identity, message))

    def _read_core(self, identity: bytes, frame: bytes) -> None:
        rank = int.from_bytes(identity[:2], "little")
        if rank not in self._cores:
            raise WireError("no engine core has this identity")
        rank_of_peer(identity, self._cores[rank].secret)
        try:
            message = self._core_decoder.decode(frame)
        except ProtocolMismatchError as error:
            logger.error("%s", engine_mismatch(f"engine {self.info.name}", error.theirs))
            self._cores[rank].send_signal(signal.SIGKILL)
            raise
        if isinstance(message, EngineDead):
            self._spoken.add(rank)
            # It may only say that it has lost another one, whose end has not been looked at yet.
            self._bury_killed(but=rank)
        self._feed(CoreSpoke(rank, message))

    def _remove_socket(self, address: str) -> None:
        remove_client_socket(self.info.run_dir, address.removeprefix(IPC_PREFIX))

    def _lacks_room(self, before: int, after: int) -> str | None:
        """Say why there cannot be `after` engine cores, None if there can."""
        self._reserve.give_back()
        try:
            # It brings the configurations of all models, almost half of what a host would import at its start.
            from nbengine.engine.bounds import scaling_refusal
        except ImportError as error:
            return f"whether there is room for {after} engine cores cannot be computed: {error}"
        finally:
            self._reserve.renew()
        return scaling_refusal(self.info.config, before, after, Capacity.here())

    # Processes.

    def _remove_files(self) -> None:
        self._reserve.give_back()

        def remove() -> None:
            # Checked first, because the removal leaves what it cannot remove, and does not say so.
            check_room(RESERVE)
            remove_engine_files(self.info)

        if not persist(remove, self._setbacks, REMOVE_PATIENCE):
            logger.error("there were no descriptors to remove the engine's files")

    def _state_of_core(self, rank: int) -> ProcessState:
        return self._cores[rank].state() if rank in self._cores else ProcessState.RUNNING

    def _start_core(self, rank: int, incarnation: int) -> None:
        try:
            self._cores[rank] = self._launcher.start(rank, incarnation)
            self._start_by.pop(rank, None)
        except EngineStartError as error:
            now = time.monotonic()
            if is_shortage(error) and now < self._start_by.setdefault(rank, now + START_PATIENCE):
                raise
            self._start_by.pop(rank, None)
            logger.error("%s", error.cause)
            self._events.append(StartFailed(rank, error.cause))

    def _reap(self) -> None:
        for rank, core in list(self._cores.items()):
            # What another one said may have had it looked at already.
            status = core.poll() if self._cores.get(rank) is core else None
            if status is None:
                continue
            if status != 0:
                # They are read while the rank is known: a message of an unknown one is refused.
                self._read_last_words(rank)
            if self._cores.get(rank) is core:
                self._bury(rank, core, status)

    def _bury_killed(self, but: int) -> None:
        """Take note of the cores that were killed, except one: theirs is the first cause, and they say nothing."""
        for rank, core in list(self._cores.items()):
            status = None if rank == but else core.poll()
            # A core aborts because of what has happened to another one, too.
            if status is not None and status < 0 and status != -signal.SIGABRT:
                self._bury(rank, core, status)

    def _bury(self, rank: int, core: CoreHandle, status: int) -> None:
        del self._cores[rank]
        self._listening.discard(rank)
        self._spoken.discard(rank)
        core.close()
        how = core.describe_end()
        logger.info("engine core %d (pid %d) %s", rank, core.pid, how)
        tail = core.log_tail() if status != 0 else ""
        self._feed(CoreExited(rank, core.pid, how, status == 0, tail))

    def _read_last_words(self, rank: int) -> None:
        # The time is limited, because other cores go on sending messages. Looks are counted, and no time, since
        # this process may itself have got none.
        end = time.monotonic() + LONGEST_LAST_WORDS
        looks = LAST_WORDS_LOOKS
        while looks and rank not in self._spoken and time.monotonic() < end:
            if self._core_control.poll(LAST_WORDS_LOOK_MS):
                self._read(self._from_cores, self._read_core)
            else:
                looks -= 1

    def _on_signals(self) -> None:
        for number in self._signals.read():
            if number in END_SIGNALS:
                self._feed(StopAsked(f"the engine was ended by {signal.Signals(number).name}"))
        self._reap()
