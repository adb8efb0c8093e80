"""A client's connection to the engine's host: lease, news of the start, and the engine's death."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

import zmq

from nbengine.client.engines.launch import host_exit, host_status
from nbengine.client.engines.logs import last_words_of
from nbengine.client.link.engine_end import EngineEnd
from nbengine.client.link.engine_verdict import Death, EngineVerdict
from nbengine.client.link.engine_watch import EngineWatch
from nbengine.client.link.history_calls import HistoryCalls
from nbengine.client.link.host_answers import HostAnswers
from nbengine.client.link.host_connection import HostConnection
from nbengine.client.link.lease import Lease
from nbengine.client.link.leaving import EXIT_TIMEOUT, leave_at_exit
from nbengine.client.link.link_listener import LinkListener
from nbengine.client.link.ownership import Owner
from nbengine.client.link.scale_calls import ScaleCalls
from nbengine.client.link.stalls import HOST_RANK
from nbengine.client.link.wake import WakePipe
from nbengine.errors import (
    EngineDeadError,
    EngineStartError,
    LeaseExpiredError,
    NBEngineError,
    ProtocolMismatchError,
    WireError,
)
from nbengine.ipc.control_messages import (
    Attached,
    ClientToHost,
    Detach,
    EngineDead,
    EngineLost,
    EngineReady,
    Heartbeat,
    HeartbeatAck,
    HistoryPage,
    HostToClient,
    LeaseLost,
    Progress,
    RanksChanged,
    ReadHistory,
    Recovered,
    Refused,
    Scaled,
    Shutdown,
    Stalled,
)
from nbengine.ipc.doorkeeper import Doorkeeper
from nbengine.ipc.handshake import ControlDecoder
from nbengine.ipc.liveness import ProcessIdentity, machine_id
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.protocol import PROTOCOL, client_mismatch
from nbengine.ipc.shortage import Setbacks
from nbengine.runtime.connection import ConnectionInfo

logger = logging.getLogger(__name__)

WATCH_INTERVAL = 0.5
"""Seconds between two looks at the engine's processes."""
HOST_EXIT_TIMEOUT = 10.0
"""Seconds from the request to end, or from the notice of death, after which the host is killed."""
SIGTERM_TIMEOUT = 2.0
"""Seconds that a host that does not hear a request to end gets after a signal, before it is killed."""
CORE_EXIT_GRACE = 2.0
"""Seconds that engine cores get to end by themselves when their host is gone."""
JOIN_TIMEOUT = 30.0
"""Seconds in which the link's thread ends in any case, whatever it has to clear away."""
LAST_WORDS_PATIENCE = 2.0
"""Seconds in which the last message of a host that has ended is read."""
NOT_ASKED = "the engine ended"
NOT_SCALED = "the engine ended before it was scaled"
NOT_READ = "the engine ended before its history was read"


class _Farewell(NamedTuple):
    """The news that an engine core has said good-bye to the client."""

    rank: int
    incarnation: int


class HostLink:
    """A daemon thread that keeps a lease on an engine, and finds out when the engine is dead.

    It learns of a death from the host, at once; because the host is gone, within `WATCH_INTERVAL`; or because
    a core is gone (`core_died`, or its process) and the host does not say more (`EngineVerdict`). Then it
    tells the listener, and makes sure that no process and no file of the engine is left.

    Over a network, a connection that breaks ends the lease, because messages on their way may be lost; when
    no connection can be made for half the time of a lease, the engine is out of reach. Only the connection
    tells of a host elsewhere.

    `Lease` says when the link asks for a lease and keeps it.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        session: str,
        input_address: str,
        output_address: str,
        listener: LinkListener,
        secret: bytes = b"",
    ) -> None:
        self.info = info
        self._shutting_down = False
        addresses = (input_address, output_address)
        self._lease = Lease(info, session, addresses, secret)
        self._listener = listener
        self._wake = WakePipe()
        self._peer_log = PeerLog(logger)
        self._outbox: deque[ClientToHost | _Farewell | None] = deque()
        self._scale_calls = ScaleCalls()
        self._history_calls = HistoryCalls()
        self._poller = zmq.Poller()
        self._host = HostConnection(info, self._poller, linger=int(EXIT_TIMEOUT * 1000))
        self._decoder: ControlDecoder[HostToClient] = ControlDecoder(HostToClient)
        self._host_answers = HostAnswers(info, self._lease.heartbeat_interval)
        self._next_look = 0.0
        self._started = False
        self._closed = False
        self._ended = False
        self._left = False
        self._failed = False
        self._over = False
        """Nothing is left of the engine on this machine, or it is on another machine, out of reach."""
        self._owner = Owner()
        self._door = Doorkeeper(addresses)
        self._setbacks = Setbacks(logger, f"the link to the host of engine {info.name} falters")
        self._watch = EngineWatch(info)
        self._verdict = EngineVerdict(self._watch)
        self._end = EngineEnd(info, self._watch)
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nbengine-host-link", daemon=True)

    @property
    def is_mine(self) -> bool:
        """Tell whether this process has made this link, and is no fork of the process that has."""
        return self._owner.is_here

    def start(self) -> None:
        """Attach, and keep the lease from now on."""
        leave_at_exit(self)
        self._thread.start()

    def core_died(self, rank: int, incarnation: int) -> None:
        """Tell the link that an engine core has said good-bye; it will find out why.

        This is called on the thread of the outputs.
        """
        self._outbox.append(_Farewell(rank, incarnation))
        self._wake.wake()

    def scale(self, data_parallel_size: int) -> Future[int]:
        """Ask for `data_parallel_size` engine cores; the future gets the host's answer.

        This is safe on any thread.
        """
        future = self._scale_calls.begin(data_parallel_size, self._outbox.append)
        self._wake.wake()
        if self._ended:
            self._scale_calls.fail(EngineDeadError(NOT_SCALED))
        return future

    def read_history(self, asked: ReadHistory) -> Future[HistoryPage]:
        """Ask the host for a page of the history; the future gets its answer. This is safe on any thread."""
        future = self._history_calls.begin(asked)
        self._wake.wake()
        if self._ended:
            self._history_calls.fail(EngineDeadError(NOT_READ))
        return future

    def ask_host(self) -> Future[None]:
        """Ask the host for an answer; the future is done when it has come. This is safe on any thread."""
        future = self._host_answers.ask()
        self._wake.wake()
        if self._ended:
            self._host_answers.fail(EngineDeadError(NOT_ASKED))
        return future

    def request_detach(self) -> None:
        """Give the lease back and end the link; do not wait.

        This is safe on any thread and in finalizers.
        """
        self._outbox.extend((Detach(), None))
        self._wake.wake()

    def request_shutdown(self, *, drain: bool = False) -> None:
        """Ask the host to end the engine, with which the link ends; do not wait.

        This is as safe as `request_detach`.
        """
        self._shutting_down = self._verdict.is_end_expected = True
        self._outbox.append(Shutdown(drain))
        self._wake.wake()
        if self._ended:
            self._ask_if_failed()

    def detach(self) -> None:
        """Give the lease back, end the link and wait for its thread."""
        self.request_detach()
        self.join(EXIT_TIMEOUT + 1.0)

    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine and wait until all its processes are gone; they are killed if they do not go.

        With `drain`, the engine's requests finish first, however long that takes. A host that does not hear,
        or that this link cannot reach any more, gets signals.
        """
        self.request_shutdown(drain=drain)
        if self._closed:
            # The link's thread is seeing to the engine's end, or has ended itself.
            self.join()
        patience = SIGTERM_TIMEOUT
        if self._gone.wait(None if drain else HOST_EXIT_TIMEOUT):
            patience = HOST_EXIT_TIMEOUT
        if not self._over:
            logger.warning("engine %s did not end when asked to, ending it by signals", self.info.name)
            self._end.force(min(patience, HOST_EXIT_TIMEOUT))
            self._over = True
            self._gone.set()
        self.join()
        self._let_go()

    def join(self, timeout: float = JOIN_TIMEOUT) -> None:
        """Wait for the link's thread, unless called on it."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        self._poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._closed:
                self._turn()
        except Exception as error:
            logger.exception("the link to the host of engine %s failed", self.info.name)
            self._failed = True
            self._listener.on_dead(EngineDeadError(f"the link to the engine's host failed: {error!r}"))
            # Without this message the lease would never lapse, since this process goes on.
            with contextlib.suppress(zmq.ZMQError):
                self._host.send(Detach())
        finally:
            self._close()

    def _turn(self) -> None:
        """Wait for something to do, and do it; work that meets a shortage is done in a later turn."""
        try:
            self._poller.poll(self._patience_ms())
            self._wake.drain()
            self._send_outbox()
            self._receive()
            self._look_at_connection(time.monotonic())
            self._look_at_clock(time.monotonic())
            if not self._closed and time.monotonic() >= self._lease.ask_at:
                self._attach()
        except (OSError, zmq.ZMQError, NBEngineError) as error:
            time.sleep(self._setbacks.note(error))

    def _close(self) -> None:
        self._closed = True
        self._host.close()
        self._wake.close()
        self._door.close()
        self._ended = True
        self._scale_calls.fail(EngineDeadError(NOT_SCALED))
        self._history_calls.fail(EngineDeadError(NOT_READ))
        self._host_answers.fail(EngineDeadError(NOT_ASKED))
        if self._shutting_down:
            self._ask_if_failed()
        elif self._over or self._left:
            self._let_go()
        self._gone.set()

    def _ask_if_failed(self) -> None:
        """Have the host end the engine by a signal, if this link has failed and cannot send it anything."""
        if self._failed and not self._over:
            self._end.ask()

    def _let_go(self) -> None:
        self._end.close()
        self._watch.close()

    def _patience_ms(self) -> int:
        due = min(self._lease.due, self._next_look, self._verdict.due)
        due = min(due, self._host.unreachable_at, self._history_calls.due, self._host_answers.due)
        return max(0, int((due - time.monotonic()) * 1000) + 1)

    def _attach(self) -> None:
        """Ask for a lease, if this process has descriptors left: the cores will connect to this client."""
        if self._door.look():
            self._host.send(self._lease.request())
        else:
            self._lease.ask_at = time.monotonic() + WATCH_INTERVAL

    def _send_outbox(self) -> None:
        while self._outbox:
            match self._outbox.popleft():
                case None:
                    self._closed = self._left = True
                case _Farewell(rank, incarnation):
                    self._verdict.farewell(rank, incarnation, time.monotonic())
                case message:
                    self._host.send(message)
        now = time.monotonic()
        if now >= self._host_answers.due:
            self._host_answers.asked(now)
            self._host.send(Heartbeat())
        asked = self._history_calls.next(now)
        if asked is not None:
            self._host.send(asked)

    def _receive(self) -> None:
        while not self._closed:
            try:
                frame = self._host.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(self._decoder.decode(frame))
            except ProtocolMismatchError as error:
                self._host.send(Detach())
                self._on_refusal(client_mismatch(f"engine {self.info.name}", error.theirs, PROTOCOL))
            except WireError as error:
                message = "dropped a message of the host of engine %s: %s"
                self._peer_log.warn_of("host", message, self.info.name, error)

    def _on_message(self, message: HostToClient) -> None:
        match message:
            case Attached(client_index, engine_ranks, tensor_dir):
                self._lease.granted(client_index, time.monotonic())
                self._verdict.attached(engine_ranks)
                self._listener.on_attached(client_index, engine_ranks, tensor_dir)
            case Refused(reason):
                self._on_refusal(reason)
            case HeartbeatAck():
                self._on_answer()
            case EngineReady():
                self._on_ready(message)
            case Progress():
                self._listener.on_progress(message)
            case RanksChanged(engine_ranks):
                self._verdict.ranks_changed(engine_ranks)
                self._listener.on_ranks_changed(engine_ranks)
            case EngineLost():
                self._listener.on_engine_lost(message)
            case Scaled():
                future = self._scale_calls.take()
                if future is not None:
                    self._listener.on_scaled(future, message)
            case HistoryPage():
                self._history_calls.answered(message)
            case Stalled():
                self._listener.on_stalled(message)
            case Recovered(rank):
                self._listener.on_recovered(rank)
            case LeaseLost(reason):
                self._on_answer()
                self._on_lease_lost(reason)
            case EngineDead():
                self._on_notice(message)

    def _on_refusal(self, reason: str) -> None:
        # The engine goes on for clients that it understands.
        self._closed = self._left = True
        self._listener.on_dead(EngineStartError(reason))

    def _on_answer(self) -> None:
        if self._host_answers.answered():
            self._listener.on_recovered(HOST_RANK)

    def _on_ready(self, ready: EngineReady) -> None:
        self._started = True
        self._verdict.ready(ready.rank, ready.incarnation)
        if ready.machine in ("", machine_id()):
            self._watch.watch_core(ready.rank, ProcessIdentity(ready.pid, ready.started))
        self._listener.on_ready(ready)

    def _on_notice(self, notice: EngineDead) -> None:
        self._verdict.noticed(notice, time.monotonic())
        self._lease.rest()
        self._next_look = float("inf")

    def _on_lease_lost(self, reason: str) -> None:
        # Answers to heartbeats that were sent before the loss was known come after it.
        if not self._lease.is_held:
            return
        self._lease.lost()
        self._listener.on_lease_lost(
            LeaseExpiredError(f"engine {self.info.name} has dropped this client's requests: {reason}")
        )

    def _look_at_connection(self, now: float) -> None:
        if self._closed or not self._host.look(now):
            return
        # The host's last message may have come since the last look.
        self._receive()
        if self._verdict.notice is not None or self._closed:
            return
        self._host.reopen()
        reason = "the connection to its host broke"
        self._host_answers.fail(NBEngineError(f"{self.info.name} was asked, and {reason}"))
        self._history_calls.fail(
            NBEngineError(f"the history of {self.info.name} was asked for, and {reason}")
        )
        self._scale_calls.fail(
            NBEngineError(f"it is not known whether {self.info.name} was scaled: {reason}")
        )
        if self._lease.is_held:
            self._on_lease_lost(reason)
        else:
            self._lease.ask_at = 0.0

    def _look_at_clock(self, now: float) -> None:
        if self._closed:
            return
        if self._lease.heartbeat(now):
            self._host_answers.asked(now)
            self._host.send(Heartbeat())
        if now >= self._next_look:
            self._next_look = now + WATCH_INTERVAL
            self._door.look()
            self._look_at_processes(now)
        death = self._verdict.death(now)
        if death is not None and not self._closed:
            self._die(death)
        elif not self._closed and self._verdict.notice is None and now >= self._host.unreachable_at:
            hint = "" if self._started else "; does it run, and is this its connection file?"
            self._die(
                Death(f"the engine's host is out of reach at {self._host.address}{hint}"), remains=False
            )

    def _look_at_processes(self, now: float) -> None:
        if self._watch.host_gone():
            # One that was killed has said nothing.
            status = host_status(self.info)
            self._hear_last_words(0.0 if status is not None and status < 0 else LAST_WORDS_PATIENCE)
            if self._verdict.notice is None:
                how = host_exit(self.info) or "is gone"
                self._die(Death(f"the engine's host process (pid {self.info.host_pid}) {how}"))
        else:
            self._verdict.look(now)
        stalled = self._host_answers.look(now)
        if stalled is not None and self._verdict.notice is None:
            self._listener.on_stalled(stalled)

    def _hear_last_words(self, patience: float) -> None:
        """Receive what a host that is gone has sent: it is on this machine, but the thread that reads sockets may not
        have had its turn yet."""
        end = time.monotonic() + patience
        self._receive()
        while self._verdict.notice is None and not self._closed and (left := end - time.monotonic()) > 0:
            self._host.socket.poll(int(left * 1000) + 1)
            self._receive()

    def _die(self, death: Death, *, remains: bool = True) -> None:
        """End the link. `remains`: the engine is at its end, and its remains on this machine are removed."""
        self._closed = True
        started = self._started if death.started is None else death.started
        kind = EngineDeadError if started else EngineStartError
        log_tail = "" if death.explained else death.log_tail or last_words_of(self.info)
        self._listener.on_dead(kind(death.cause, log_tail))
        if remains and self.info.is_here:
            self._end.wait(HOST_EXIT_TIMEOUT)
            self._end.clear(grace=CORE_EXIT_GRACE)
        self._over = remains or not self.info.is_here
        self._gone.set()
