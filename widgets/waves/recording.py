"""This module records what an engine publishes, while something else goes on."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.metrics.stats import EngineStats
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.waves.timeline import WaveRecorder, WaveTimeline

_PATIENCE = 0.1
"""Seconds after which the recording's thread looks whether it should end."""


class WaveRecording:
    """A recording of an engine's statistics in a background thread: a context manager around that time.

    It needs neither a client nor a lease, and costs the engine a subscriber.
    """

    def __init__(self, info: ConnectionInfo) -> None:
        self._info = info
        self._recorder = WaveRecorder(info.name, info.config.lock_step)
        self._lock = threading.Lock()
        self._first = threading.Event()
        self._closing = threading.Event()
        self._ended_at: float | None = None
        self._thread = threading.Thread(target=self._follow, name="nbengine-wave-recording", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        # From the first message on, nothing is missed; an engine that has gone publishes none.
        while not self._first.wait(_PATIENCE) and self._thread.is_alive() and self._info.host_alive:
            pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_at = time.time()
        self._closing.set()
        self._thread.join()

    @property
    def timeline(self) -> WaveTimeline:
        """Return the timeline that has been recorded until now."""
        with self._lock:
            return self._recorder.timeline(self._ended_at or time.time())

    def _follow(self) -> None:
        with StatsSubscriber(self._info) as subscriber:
            while True:
                is_closing = self._closing.is_set()
                # What was published before the end is read to its end.
                message = subscriber.poll(0 if is_closing else _PATIENCE)
                if message is None and is_closing:
                    return
                if isinstance(message, EngineStats):
                    with self._lock:
                        self._recorder.take(message)
                    self._first.set()
