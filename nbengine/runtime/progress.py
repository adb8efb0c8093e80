"""The progress of a fetch: one reporter per resolution, and a watcher for downloads that report nothing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nbengine.ipc.control_messages import Progress

ProgressCallback = Callable[[Progress], None]

_WATCH_INTERVAL_SECONDS = 0.2


class Reporter:
    """A reporter sends `Progress` messages of one stage; `seconds` counts from the reporter's creation."""

    def __init__(self, callback: ProgressCallback | None, stage: str) -> None:
        self._callback = callback
        self._stage = stage
        self._start = time.monotonic()

    @property
    def heard(self) -> bool:
        """Tell whether anyone listens."""
        return self._callback is not None

    def __call__(self, detail: str, fraction: float | None = None) -> None:
        """Report `detail`; `fraction` is in [0, 1], or None where it is not known."""
        if self._callback is not None:
            seconds = time.monotonic() - self._start
            self._callback(Progress(self._stage, detail, fraction, seconds))

    @contextlib.contextmanager
    def watching(self, directory: Path, total_bytes: int, detail: str) -> Iterator[None]:
        """Report how `directory` grows towards `total_bytes` more than it holds now, while the block runs."""
        if self._callback is None:
            yield
            return
        done = threading.Event()
        before = _tree_bytes(directory)

        def watch() -> None:
            while not done.wait(_WATCH_INTERVAL_SECONDS):
                self(detail, min(1.0, (_tree_bytes(directory) - before) / max(1, total_bytes)))

        self(detail, 0.0)
        watcher = threading.Thread(target=watch, name="nbengine-fetch-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _tree_bytes(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # the downloader moves its files while we look
                total += os.lstat(os.path.join(root, name)).st_size
    return total
