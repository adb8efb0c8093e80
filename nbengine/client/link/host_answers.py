"""The answers of the engine's host to its client's heartbeats."""

from __future__ import annotations

import math
import threading
from collections import deque
from concurrent.futures import Future

from nbengine.client.link.stalls import HOST_RANK
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import Stalled
from nbengine.ipc.liveness import ProcessState
from nbengine.ipc.process_state import what_holds
from nbengine.runtime.connection import ConnectionInfo

PAUSE = 0.02
"""Least seconds between two heartbeats for those who ask: a host drops the messages of a client that sends hundreds a
second, and every later answer would be taken for that of the heartbeat before."""
STOPPED = "its process is stopped (SIGSTOP?)"
LONGEST_LOOK = 2.0
"""Seconds between two looks: if more have passed, the client itself did not run, and could not hear."""


class HostAnswers:
    """The heartbeats without an answer, which the host answers in their order.

    `ask` and `fail` are safe on any thread, the rest belongs to the link's thread.

    A host is missed when it has left a heartbeat without an answer for as long as an engine core may stand
    before that is reported, or for two intervals; if its process is stopped, that is seen earlier.
    """

    def __init__(self, info: ConnectionInfo, interval: float) -> None:
        self._info = info
        self._report_after = info.config.progress_deadlines.to_report("step")
        self._silence = max(self._report_after, 2 * interval)
        self._sent: deque[tuple[float, list[Future[None]]]] = deque()
        """The time at which each heartbeat without an answer was sent,
        and the futures that wait for its answer."""
        self._waiting: deque[Future[None]] = deque()
        """The futures that wait for the next heartbeat."""
        self._lock = threading.Lock()
        self._next_at = 0.0
        self._looked_at = 0.0
        self._stopped_since: float | None = None
        self._is_missed = False

    def ask(self) -> Future[None]:
        """Return a future of the answer to the heartbeat that is sent when it is `due`."""
        future: Future[None] = Future()
        with self._lock:
            self._waiting.append(future)
        return future

    @property
    def due(self) -> float:
        """Return when to send a heartbeat for those who ask, a time of the monotonic clock; infinity if nobody does."""
        return self._next_at if self._waiting else math.inf

    def asked(self, now: float) -> None:
        """Take note that a heartbeat is sent at `now`."""
        with self._lock:
            self._next_at = now + PAUSE
            self._sent.append((now, list(self._waiting)))
            self._waiting.clear()

    def answered(self) -> bool:
        """Take note that the oldest heartbeat is answered; return whether the host was missed before."""
        with self._lock:
            # The host also tells of a lost lease without a heartbeat.
            _, futures = self._sent.popleft() if self._sent else (0.0, [])
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        was_missed, self._is_missed = self._is_missed, False
        self._stopped_since = None
        return was_missed

    def look(self, now: float) -> Stalled | None:
        """Report once that the host does not answer; None if it does, or if that was reported before."""
        if now - self._looked_at > LONGEST_LOOK:
            # Answers may have come that are not read yet.
            with self._lock:
                self._sent = deque((now, futures) for _, futures in self._sent)
            self._stopped_since = None
        self._looked_at = now
        is_stopped = self._info.is_here and what_holds(self._info.host_pid) is ProcessState.STOPPED
        self._stopped_since = (self._stopped_since or now) if is_stopped else None
        if self._is_missed:
            return None
        stalled = self._silent_host(now)
        self._is_missed = stalled is not None
        return stalled

    def fail(self, error: NBEngineError) -> None:
        """Fail all futures: nothing more will be answered."""
        with self._lock:
            futures = [*self._waiting, *(future for _, waiting in self._sent for future in waiting)]
            self._waiting.clear()
            self._sent.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _silent_host(self, now: float) -> Stalled | None:
        since = self._stopped_since
        if since is not None and now - since >= self._report_after:
            return Stalled(HOST_RANK, now - since, STOPPED)
        sent_at = self._sent[0][0] if self._sent else now
        if now - sent_at >= self._silence:
            # This is said only once: the stop, if it is newer than the silence, could not be told later.
            why = f"pid {self._info.host_pid}" if since is None else STOPPED
            return Stalled(HOST_RANK, now - sent_at, why)
        return None
