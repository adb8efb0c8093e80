"""A client's connection to the engine's host: lease, news of the start, and the engine's death."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
import weakref
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

import zmq

from nbengine.client.connection import ConnectionInfo, process_alive, remove_engine_files
from nbengine.client.host_connection import HostConnection
from nbengine.client.launch import bury_child, host_exit
from nbengine.client.link_listener import LinkListener
from nbengine.client.processes import create_time_of, kill_session, wait_for_host
from nbengine.client.scale_calls import ScaleCalls
from nbengine.client.wake import WakePipe
from nbengine.engine.logs import log_tail
from nbengine.errors import EngineDeadError, EngineStartError, LeaseExpiredError, NBEngineError, WireError
from nbengine.ipc.control_messages import (
    Attach,
    Attached,
    ClientToHost,
    Detach,
    EngineDead,
    EngineLost,
    EngineReady,
    Heartbeat,
    HostToClient,
    LeaseLost,
    Progress,
    RanksChanged,
    Scaled,
    Shutdown,
)
from nbengine.ipc.handshake import ControlDecoder, encode_control
from nbengine.ipc.liveness import machine_id

logger = logging.getLogger(__name__)

WATCH_INTERVAL = 0.5
"""Seconds between two looks at whether the engine's processes run."""
LONGEST_HEARTBEAT_INTERVAL = 5.0
LAST_WORDS_TIMEOUT = 2.5
"""Seconds that the host gets to say why an engine core has ended."""
LAST_OUTPUTS_TIMEOUT = 1.0
"""Seconds that the last outputs of an engine that ends in good order may come after the host's notice."""
HOST_EXIT_TIMEOUT = 10.0
"""Seconds from the request to end, or from the notice of death, until the host is killed."""
CORE_EXIT_GRACE = 2.0
"""Seconds that engine cores get to end by themselves when their host is gone."""
JOIN_TIMEOUT = 30.0
"""Seconds within which the link's thread ends in any case, whatever it has to clear away."""
EXIT_TIMEOUT = 0.5
"""Seconds that the interpreter's exit may be delayed by."""
NOT_SCALED = "the engine ended before it was scaled"


class _Farewell(NamedTuple):
    """An engine core has said good-bye to the client."""

    rank: int


class HostLink:
    """Keeps a lease on an engine from a daemon thread, and finds out when the engine is dead.

    It learns of a death from the host, at once; because the host is gone, within `WATCH_INTERVAL`; or because a core
    is gone (`core_died`, or its process) and the host does not say more within `LAST_WORDS_TIMEOUT`. Then it tells
    the listener, and makes sure that no process and no file of the engine is left. Outputs come on other sockets
    than the host's notice: after an end that was asked for, the listener is told when every core has said good-bye
    there, so that streams get their last outputs first.

    Over a network, a connection that breaks ends the lease, because what was on its way may be lost; when none can be
    made for half the time of a lease, the engine is out of reach. Nothing but this tells of a host elsewhere.

    A lost lease (this process did not run for too long) is replaced by a new one under a new session name: if the
    old name was taken over by another process, that one keeps it.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        session: str,
        input_address: str,
        output_address: str,
        listener: LinkListener,
    ) -> None:
        self.info = info
        self._session = session
        self._shutting_down = False
        self._addresses = (input_address, output_address)
        self._listener = listener
        self._wake = WakePipe()
        self._outbox: deque[ClientToHost | _Farewell | None] = deque()
        self._scale_calls = ScaleCalls()
        self._poller = zmq.Poller()
        self._host = HostConnection(info, self._poller, linger=int(EXIT_TIMEOUT * 1000))
        self._decoder: ControlDecoder[HostToClient] = ControlDecoder(HostToClient)
        self._heartbeat_interval = min(info.config.lease / 4, LONGEST_HEARTBEAT_INTERVAL)
        self._next_heartbeat = float("inf")
        self._next_look = 0.0
        self._verdict_at = float("inf")
        self._attached = False
        self._client_index = 0
        self._notice: EngineDead | None = None
        self._ranks: list[int] = []
        self._farewells: set[int] = set()
        self._cores: dict[int, tuple[int, float]] = {}
        """Process id and start time by rank."""
        self._started = False
        self._closed = False
        self._ended = False
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nbengine-host-link", daemon=True)

    def start(self) -> None:
        """Attach, and keep the lease from now on."""
        _links.add(self)
        self._thread.start()

    def core_died(self, rank: int) -> None:
        """Tell the link that an engine core has said good-bye; it will find out why. On the thread of the outputs."""
        self._outbox.append(_Farewell(rank))
        self._wake.wake()

    def scale(self, data_parallel_size: int) -> Future[int]:
        """Ask for so many engine cores; the future gets the host's answer. Safe on any thread."""
        future = self._scale_calls.begin(data_parallel_size, self._outbox.append)
        self._wake.wake()
        if self._ended:
            self._scale_calls.fail(EngineDeadError(NOT_SCALED))
        return future

    def request_detach(self) -> None:
        """Give the lease back and end the link; does not wait. Safe on any thread and in finalizers."""
        self._outbox.extend((Detach(), None))
        self._wake.wake()

    def request_shutdown(self, *, drain: bool = False) -> None:
        """Ask the host to end the engine; the link ends with it. Does not wait. Safe like `request_detach`."""
        self._shutting_down = True
        self._outbox.append(Shutdown(drain))
        self._wake.wake()

    def detach(self) -> None:
        """Give the lease back, end the link and wait for its thread."""
        self.request_detach()
        self.join(EXIT_TIMEOUT + 1.0)

    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine and wait until all its processes are gone; they are killed if they do not go.

        With `drain`, what runs is finished first, however long it takes.
        """
        self.request_shutdown(drain=drain)
        if not self._gone.wait(None if drain else HOST_EXIT_TIMEOUT):
            logger.warning("engine %s did not end when asked to, killing it", self.info.name)
            self._remove_remains(grace=0.0)
        self.join()

    def join(self, timeout: float = JOIN_TIMEOUT) -> None:
        """Wait for the link's thread, unless called on it."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        self._poller.register(self._wake, zmq.POLLIN)
        try:
            self._attach()
            while not self._closed:
                self._poller.poll(self._patience_ms())
                self._wake.drain()
                self._send_outbox()
                self._receive()
                self._look_at_connection(time.monotonic())
                self._look_at_clock(time.monotonic())
        except Exception as error:
            logger.exception("the link to the host of engine %s failed", self.info.name)
            self._listener.on_dead(EngineDeadError(f"the link to the engine's host failed: {error!r}"))
        finally:
            self._host.close()
            self._wake.close()
            self._ended = True
            self._scale_calls.fail(EngineDeadError(NOT_SCALED))
            self._gone.set()

    def _patience_ms(self) -> int:
        due = min(self._next_heartbeat, self._next_look, self._verdict_at, self._host.unreachable_at)
        return max(0, int((due - time.monotonic()) * 1000) + 1)

    def _attach(self) -> None:
        input_address, output_address = self._addresses
        created = create_time_of(os.getpid())
        pid = os.getpid() if self.info.is_here else 0
        attach = Attach(self._session, pid, created or 0.0, input_address, output_address, self._client_index)
        self._host.socket.send(encode_control(attach))

    def _send_outbox(self) -> None:
        while self._outbox:
            match self._outbox.popleft():
                case None:
                    self._closed = True
                case _Farewell(rank):
                    self._on_farewell(rank)
                case message:
                    self._host.socket.send(encode_control(message))

    def _receive(self) -> None:
        while not self._closed:
            try:
                frame = self._host.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(self._decoder.decode(frame))
            except WireError as error:
                logger.warning("dropped a message of the host of engine %s: %s", self.info.name, error)

    def _on_message(self, message: HostToClient) -> None:
        match message:
            case Attached(client_index, engine_ranks, tensor_dir):
                self._attached = True
                self._client_index = client_index
                self._ranks = engine_ranks
                self._next_heartbeat = time.monotonic() + self._heartbeat_interval
                self._listener.on_attached(client_index, engine_ranks, tensor_dir)
            case EngineReady():
                self._on_ready(message)
            case Progress():
                self._listener.on_progress(message)
            case RanksChanged(engine_ranks):
                self._on_ranks_changed(engine_ranks)
            case EngineLost():
                self._listener.on_engine_lost(message)
            case Scaled():
                future = self._scale_calls.take()
                if future is not None:
                    self._listener.on_scaled(future, message)
            case LeaseLost(reason):
                self._on_lease_lost(reason)
            case EngineDead():
                self._on_notice(message)

    def _on_ready(self, ready: EngineReady) -> None:
        self._started = True
        self._farewells.discard(ready.rank)
        created = create_time_of(ready.pid) if ready.machine in ("", machine_id()) else None
        if created is not None:
            self._cores[ready.rank] = ready.pid, created
        self._listener.on_ready(ready)

    def _on_ranks_changed(self, engine_ranks: list[int]) -> None:
        self._ranks = engine_ranks
        for rank in self._cores.keys() - set(engine_ranks):
            del self._cores[rank]
        # The host has spoken: the engine goes on without those that are not listed.
        if self._notice is None and not self._is_one_gone():
            self._verdict_at = float("inf")
        self._listener.on_ranks_changed(engine_ranks)

    def _on_farewell(self, rank: int) -> None:
        self._farewells.add(rank)
        if rank in self._ranks:
            self._expect_last_words(time.monotonic())

    def _on_notice(self, notice: EngineDead) -> None:
        self._notice = notice
        patience = LAST_OUTPUTS_TIMEOUT if notice.expected and notice.started else 0.0
        self._verdict_at = time.monotonic() + patience
        self._next_heartbeat = self._next_look = float("inf")

    def _on_lease_lost(self, reason: str) -> None:
        # Answers to heartbeats that were sent before the loss was known come after it.
        if not self._attached:
            return
        self._attached = False
        self._next_heartbeat = float("inf")
        self._session = f"{self._session.partition('#')[0]}#{uuid.uuid4().hex[:8]}"
        self._listener.on_lease_lost(
            LeaseExpiredError(f"engine {self.info.name} has dropped this client's requests: {reason}")
        )
        self._attach()

    def _look_at_connection(self, now: float) -> None:
        if self._closed or not self._host.look(now):
            return
        # Its last message may have come since the last look.
        self._receive()
        if self._notice is not None or self._closed:
            return
        self._host.reopen()
        reason = "the connection to its host broke"
        self._scale_calls.fail(
            NBEngineError(f"it is not known whether {self.info.name} was scaled: {reason}")
        )
        if self._attached:
            self._on_lease_lost(reason)
        else:
            self._attach()

    def _look_at_clock(self, now: float) -> None:
        if self._closed:
            return
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_interval
            self._host.socket.send(encode_control(Heartbeat()))
        if now >= self._next_look:
            self._next_look = now + WATCH_INTERVAL
            self._look_at_processes(now)
        if self._notice is not None:
            if now >= self._verdict_at or self._farewells.issuperset(self._ranks):
                self._die(self._notice.cause, self._notice.log_tail, started=self._notice.started)
        elif not self._closed and now >= self._verdict_at:
            self._die("an engine core ended, and the host does not say why")
        elif not self._closed and now >= self._host.unreachable_at:
            hint = "" if self._started else "; does it run, and is this its connection file?"
            self._die(f"the engine's host is out of reach at {self._host.address}{hint}", remains=False)

    def _look_at_processes(self, now: float) -> None:
        if not self.info.host_alive:
            # Its last message may have come since the last look.
            self._receive()
            if self._notice is None:
                how = host_exit(self.info) or "is gone"
                self._die(f"the engine's host process (pid {self.info.host_pid}) {how}")
        elif self._is_one_gone():
            self._expect_last_words(now)

    def _is_one_gone(self) -> bool:
        said_goodbye = self._farewells.intersection(self._ranks)
        return bool(said_goodbye) or not all(process_alive(*core) for core in self._cores.values())

    def _expect_last_words(self, now: float) -> None:
        # When everything is being ended, cores end first, and the host takes its time to see to it.
        if self._verdict_at == float("inf") and not self._shutting_down:
            self._verdict_at = now + LAST_WORDS_TIMEOUT

    def _die(self, cause: str, tail: str = "", *, started: bool | None = None, remains: bool = True) -> None:
        """End the link. `remains`: the engine is at its end, and nothing may be left of it on this machine."""
        self._closed = True
        started = self._started if started is None else started
        kind = EngineDeadError if started else EngineStartError
        self._listener.on_dead(kind(cause, tail or log_tail(self.info.log_path)))
        if not (remains and self.info.is_here):
            return
        wait_for_host(self.info, HOST_EXIT_TIMEOUT)
        self._remove_remains(grace=CORE_EXIT_GRACE)

    def _remove_remains(self, grace: float) -> None:
        killed = kill_session(self.info, grace)
        if killed:
            logger.warning("killed what was left of engine %s: pids %s", self.info.name, killed)
        remove_engine_files(self.info)
        bury_child(self.info.run_dir)
        self._gone.set()


_links: weakref.WeakSet[HostLink] = weakref.WeakSet()


def _leave_all() -> None:
    """At the interpreter's exit: give the leases back. A bound engine sees the exit itself, on its pipe."""
    for link in list(_links):
        link.request_detach()
    for link in list(_links):
        link.join(EXIT_TIMEOUT)


atexit.register(_leave_all)
