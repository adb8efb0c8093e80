"""The activity of an engine core, and the thread that reports it to the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Literal

import zmq

from nbengine.ipc.control_messages import Progress, Pulse, WorkerPulse
from nbengine.ipc.handshake import encode_control
from nbengine.ipc.messages import pulse_identity
from nbengine.ipc.sockets import make_socket

Doing = Literal["load", "step", "call", "idle"]
MAX_UNSENT = 16
"""Most pulses that wait for a host which does not read: older ones say nothing that newer ones do not."""


class Activity:
    """The fields that the busy loop writes and the pulse thread reads, each by itself and without a lock."""

    def __init__(self) -> None:
        self.turns = 0
        """A count that grows with everything that is done."""
        self.doing: Doing = "load"
        self.name = ""
        """The name of the call, or of the part that is loaded."""
        self.step_number: Callable[[], int] = lambda: 0
        self.workers: Callable[[], list[WorkerPulse]] = list
        self._last_progress: tuple[object, ...] = ()

    def begin(self, doing: Doing, name: str = "") -> None:
        """Note that something begins, and that the activity before it has ended."""
        self.turns += 1
        self.doing = doing
        self.name = name

    def load(self, progress: Progress) -> None:
        """Note the report of a load; a repeated report is no progress."""
        said = (progress.stage, progress.detail, progress.fraction, progress.worker)
        if said != self._last_progress:
            self._last_progress = said
            self.begin("load", f"{progress.stage}: {progress.detail}" if progress.detail else progress.stage)

    @property
    def detail(self) -> str:
        """Say what the engine core is doing, in words that can follow "no progress for 42 s,"."""
        match self.doing:
            case "step":
                return f"in step {self.step_number():,}"
            case "call":
                return f"in the call {self.name}"
            case "load":
                return f"loading ({self.name})" if self.name else "loading"
            case "idle":
                return "waiting for work"


class PulseThread(threading.Thread):
    """The thread that reports an `Activity` to the host, on its own socket.

    Neither the busy loop nor the work of the input thread can hold it up; only a stopped process can, or code
    that holds the interpreter.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        rank: int,
        incarnation: int,
        interval: float,
        activity: Activity,
        secret: bytes = b"",
    ) -> None:
        super().__init__(name="nbengine-pulse", daemon=True)
        self._socket = make_socket(
            context,
            address,
            zmq.DEALER,
            bind=False,
            identity=pulse_identity(rank, incarnation, secret),
            send_hwm=MAX_UNSENT,
        )
        self._incarnation = incarnation
        self._interval = interval
        self._activity = activity
        self._stopped = threading.Event()

    def run(self) -> None:
        """Send a pulse at each interval until `stop`."""
        try:
            while not self._stopped.wait(self._interval):
                # A host that does not read now reads later, or has ended, which the lifeline notices.
                with contextlib.suppress(zmq.Again):
                    self._socket.send(encode_control(self._pulse()), zmq.NOBLOCK)
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        if self.ident is None:
            self._socket.close()
        else:
            self.join()

    def _pulse(self) -> Pulse:
        activity = self._activity
        return Pulse(self._incarnation, activity.turns, activity.doing, activity.detail, activity.workers())
