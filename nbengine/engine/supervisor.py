"""The host process: starts the engine cores, keeps the leases, publishes the statistics, cleans up.

`HostState` decides; this module has the sockets, the processes and the one poll loop around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
import psutil
import zmq

from nbengine.client.connection import (
    ConnectionInfo,
    connection_file,
    process_alive,
    read_connection,
    remove_engine_files,
    write_connection,
    write_engine_file,
)
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
    ResizeCoordinator,
    SignalCores,
    StartCore,
    StartFailed,
    StopAsked,
    TimePassed,
    ToClient,
    ToCore,
)
from nbengine.engine.host_sockets import HostSockets, handshake_of
from nbengine.engine.host_state import HostState
from nbengine.engine.launchers import core_launcher
from nbengine.engine.lock_step import lock_step_of
from nbengine.engine.logs import describe_exception, log_tail
from nbengine.engine.processes import (
    PARENT_FD_VARIABLE,
    CoreHandle,
)
from nbengine.errors import EngineStartError, NBEngineError, WireError
from nbengine.ipc.control_messages import ClientToHost, CoreToHost, EngineDead, EngineReady
from nbengine.ipc.handshake import ControlDecoder, encode_control
from nbengine.ipc.messages import engine_identity
from nbengine.ipc.shm_tensors import remove_abandoned
from nbengine.ipc.sockets import IPC_PREFIX

logger = logging.getLogger(__name__)

PARENT_INTERVAL = 1.0
"""Seconds between two looks at whether a bound engine's parent still runs: a process that the parent has forked
holds the pipe open, and there may be no pipe."""
LAST_WORDS_MS = 100
"""How long a message of an engine core may be under way when its process is already gone."""
LAST_MESSAGE_LINGER_MS = 1000
KILLED_WAIT = 5.0
"""Seconds that a killed process may take to be gone."""


class Supervisor:
    """The host's I/O around a `HostState`."""

    def __init__(self, info: ConnectionInfo) -> None:
        self.info = info
        self._signal_input, self._signal_output = socket.socketpair()
        self._watch_signals()
        sockets = HostSockets(info)
        self._context = sockets.context
        self._clients = sockets.clients
        self._core_control = sockets.cores
        self._coordinator = sockets.coordinator
        self._state = HostState(
            info.config, handshake_of(info), process_alive, time.monotonic(), lock_step_of(info)
        )
        self._launcher = core_launcher(info, self._wake)
        self._cores: dict[int, CoreHandle] = {}
        self._listening: set[int] = set()
        self._events: deque[Event] = deque()
        self._client_decoder: ControlDecoder[ClientToHost] = ControlDecoder(ClientToHost)
        self._core_decoder: ControlDecoder[CoreToHost] = ControlDecoder(CoreToHost)
        self._poller = zmq.Poller()
        self._parent_fd = _inherited_parent_fd() if info.config.bound else None
        self._parent_pid = os.getppid()
        self._end: End | None = None

    def run(self) -> EngineDead:
        """Run the engine to its end and return what the clients were told about it."""
        for source in (self._clients, self._core_control):
            self._poller.register(source, zmq.POLLIN)
        self._coordinator.register(self._poller)
        self._poller.register(self._signal_input.fileno(), zmq.POLLIN)
        if self._parent_fd is not None:
            self._poller.register(self._parent_fd, zmq.POLLIN)
        self._perform_all(self._state.begin())
        while self._end is None:
            self._poll_once()
        return self._end.notice

    def close(self, notice: EngineDead) -> None:
        """End what still runs, remove the engine's files, and only then tell the clients."""
        for core in self._cores.values():
            core.close()
        for core in self._cores.values():
            try:
                core.wait(KILLED_WAIT)
            except TimeoutError as error:
                # Its machine may be gone.
                logger.warning("%s", error)
        self._launcher.close()
        remove_engine_files(self.info)
        audience = {lease.identity for lease in self._state.leases.leases}
        if self._end is not None:
            audience.update(self._end.audience)
        while self._clients.poll(0):
            audience.add(self._clients.recv_multipart()[0])
        for identity in audience:
            self._send(self._clients, identity, notice)
        self._clients.close(linger=LAST_MESSAGE_LINGER_MS)
        self._core_control.close()
        self._coordinator.close()
        self._context.term()

    # The poll loop.

    def _poll_once(self) -> None:
        timeout_ms = self._timeout_ms(time.monotonic())
        ready = {source for source, _ in self._poller.poll(timeout_ms)}
        now = time.monotonic()
        for router, read in ((self._core_control, self._read_core), (self._clients, self._read_client)):
            if router in ready:
                self._read_all(router, read)
        self._coordinator.process(ready, now)
        for wish in self._coordinator.take_wishes():
            self._tell_cores(wish)
        if self._signal_input.fileno() in ready:
            self._on_signals()
        if self._parent_fd in ready or self._parent_is_gone():
            self._on_parent_gone()
        if self._state.next_deadline() <= now:
            self._feed(TimePassed())

    def _timeout_ms(self, now: float) -> int | None:
        deadline = min(self._state.next_deadline(), self._coordinator.deadline)
        if self.info.config.bound:
            deadline = min(deadline, now + PARENT_INTERVAL)
        return None if deadline == math.inf else max(0, math.ceil((deadline - now) * 1000))

    def _feed(self, event: Event) -> None:
        self._perform_all(self._state.handle(event, time.monotonic()))

    def _perform_all(self, actions: list[Action]) -> None:
        """Carry out actions, and what follows from their failures."""
        for action in actions:
            self._perform(action)
        while self._events:
            self._feed(self._events.popleft())

    def _perform(self, action: Action) -> None:
        match action:
            case ToClient(identity, message):
                self._send(self._clients, identity, message)
            case ToCore(rank, message):
                self._send(self._core_control, engine_identity(rank), message)
            case StartCore(rank, incarnation):
                self._start_core(rank, incarnation)
            case SignalCores(number, ranks):
                for rank in self._cores.keys() & set(ranks):
                    self._cores[rank].send_signal(number)
            case RemoveSockets(addresses):
                for address in addresses:
                    self._remove_socket(address)
            case RemoveTensors(live):
                if self.info.tensor_dir:
                    remove_abandoned(self.info.tensor_dir, live)
            case RecordReady(engines, size):
                self._record_ready(engines, size)
            case CoreReady(rank):
                self._listening.add(rank)
                for wish in self._coordinator.standing_wishes:
                    self._send(self._core_control, engine_identity(rank), wish)
            case ForgetStats(rank):
                self._coordinator.state.forget(rank)
            case ResizeCoordinator(size):
                self._coordinator.state.scale(size)
            case End():
                self._end = action

    # Messages.

    def _send(self, router: zmq.Socket[bytes], identity: bytes, message: msgspec.Struct) -> None:
        # A ROUTER drops what is for a peer that is gone, which is what we want.
        router.send_multipart([identity, encode_control(message)])

    def _tell_cores(self, message: msgspec.Struct) -> None:
        for rank in self._listening:
            self._send(self._core_control, engine_identity(rank), message)

    def _read_all(self, router: zmq.Socket[bytes], read: Callable[[bytes, bytes], None]) -> None:
        while router.poll(0):
            identity, *frames = router.recv_multipart()
            try:
                if len(frames) != 1:
                    raise WireError(f"a control message has one frame, this one has {len(frames)}")
                read(identity, frames[0])
            except WireError as error:
                logger.warning("dropped a message from %r: %s", identity, error)

    def _read_client(self, identity: bytes, frame: bytes) -> None:
        self._feed(ClientSpoke(identity, self._client_decoder.decode(frame)))

    def _read_core(self, identity: bytes, frame: bytes) -> None:
        message = self._core_decoder.decode(frame)
        rank = int.from_bytes(identity, "little")
        if rank not in self._cores:
            raise WireError("no engine core has this identity")
        self._feed(CoreSpoke(rank, message))

    def _remove_socket(self, address: str) -> None:
        path = Path(address.removeprefix(IPC_PREFIX))
        if address.startswith(IPC_PREFIX) and path.parent == Path(self.info.run_dir):
            path.unlink(missing_ok=True)

    def _record_ready(self, engines: list[EngineReady], size: int) -> None:
        config = self.info.config
        parallel = dataclasses.replace(config.parallel, data_parallel_size=size)
        self.info.config = dataclasses.replace(config, parallel=parallel)
        self.info.ready = engines
        write_connection(self.info)
        logger.info("ready: %s", ", ".join(f"engine core {e.rank}: {e.num_blocks} blocks" for e in engines))

    # Processes.

    def _start_core(self, rank: int, incarnation: int) -> None:
        try:
            self._cores[rank] = self._launcher.start(rank, incarnation)
        except EngineStartError as error:
            logger.error("%s", error.cause)
            self._events.append(StartFailed(rank, error.cause))

    def _reap(self) -> None:
        for rank, core in list(self._cores.items()):
            status = core.poll()
            if status is None:
                continue
            while status != 0 and self._core_control.poll(LAST_WORDS_MS):
                self._read_all(self._core_control, self._read_core)
            del self._cores[rank]
            self._listening.discard(rank)
            core.close()
            how = core.describe_end()
            logger.info("engine core %d (pid %d) %s", rank, core.pid, how)
            tail = core.log_tail() if status != 0 else ""
            self._feed(CoreExited(rank, core.pid, how, status == 0, tail))

    def _watch_signals(self) -> None:
        for end in (self._signal_input, self._signal_output):
            end.setblocking(False)
        # The wakeup socket ends the poll; the handlers have nothing to do but exist.
        signal.set_wakeup_fd(self._signal_output.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, _noted)

    def _wake(self) -> None:
        """End the poll, from any thread, to have a look at the cores."""
        # When there is no room, enough has been said.
        with contextlib.suppress(BlockingIOError):
            self._signal_output.send(b"\0")

    def _on_signals(self) -> None:
        for number in self._signal_input.recv(4096):
            if number in (signal.SIGTERM, signal.SIGHUP):
                self._feed(StopAsked(f"the engine was ended by {signal.Signals(number).name}"))
        self._reap()

    def _parent_is_gone(self) -> bool:
        return self.info.config.bound and os.getppid() != self._parent_pid

    def _on_parent_gone(self) -> None:
        if self._parent_fd is not None:
            if os.read(self._parent_fd, 1):
                return
            self._poller.unregister(self._parent_fd)
            os.close(self._parent_fd)
            self._parent_fd = None
        self._parent_pid = os.getppid()
        self._feed(StopAsked("the process that started it has ended"))


def run_host(info: ConnectionInfo) -> int:
    """Run an engine's host to its end, and return the process's exit status.

    Args:
        info: what the launcher has written; the host fills in its own pid and start time.
    """
    info.host_pid = os.getpid()
    info.host_create_time = psutil.Process().create_time()
    supervisor: Supervisor | None = None
    try:
        supervisor = Supervisor(info)
        claim_name(info)
        # Where its sockets are.
        write_engine_file(info)
        notice = supervisor.run()
        if not notice.expected and not notice.log_tail:
            notice.log_tail = log_tail(info.log_path)
    except Exception as error:
        logger.exception("the host failed")
        cause = f"the host (pid {info.host_pid}) failed: {describe_exception(error)}"
        notice = EngineDead(cause, log_tail(info.log_path), started=bool(info.ready))
    if supervisor is not None:
        supervisor.close(notice)
    remove_engine_files(info)
    logger.info("ended: %s", notice.cause)
    return 0 if notice.expected else 1


def claim_name(info: ConnectionInfo) -> None:
    """Write the connection file, unless a living engine has that name.

    Raises:
        EngineStartError: one has.
    """
    try:
        other: ConnectionInfo | None = read_connection(connection_file(info.name))
    except NBEngineError:
        # No file, or one that nobody can use.
        other = None
    if other is not None and other.run_dir != info.run_dir and other.host_alive:
        raise EngineStartError(f"an engine named {info.name!r} is running (pid {other.host_pid})")
    write_connection(info)


def _inherited_parent_fd() -> int | None:
    value = os.environ.get(PARENT_FD_VARIABLE)
    if value is None:
        return None
    fd = int(value)
    os.set_inheritable(fd, False)
    return fd


def _noted(signum: int, frame: FrameType | None) -> None:
    """Handler of signals that the poll loop reads from the wakeup socket."""
