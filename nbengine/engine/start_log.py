"""The log of an engine's start: model and versions first, then each stage and how long it took."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable

from nbengine.config import ModelConfig
from nbengine.ipc.control_messages import Progress
from nbengine.version import __version__

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers")
"""The packages whose versions decide what an engine can load, and how it computes."""
_began = time.monotonic()
"""A time within the first tenths of a second of an engine's process, which imports this module first."""


def begin_now() -> None:
    """Count the start from now on: a spare process has got its order."""
    global _began
    _began = time.monotonic()


def log_beginning(name: str, model: ModelConfig) -> None:
    """Write the log's first line, without importing the packages."""
    versions = [f"nbengine {__version__}", *map(_version, PACKAGES)]
    logger.info(
        "engine %s, model %s (%s), %s, Python %s",
        name,
        model.model,
        model.directory or "not found yet",
        ", ".join(versions),
        platform.python_version(),
    )


class StartLog:
    """A log that gets each stage of an engine core's start when it ends, from `Progress` reports.

    It is for one thread at a time. The stage before the first report is "process": the interpreter, its
    imports, and the host's word to begin.

    Args:
        clock: returns seconds.
        began: the time on that clock at which the process began, or got its order if it was a spare one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, began: float | None = None) -> None:
        self._clock = clock
        self._began = self._stage_began = _began if began is None else began
        self._stage = "process"
        self._detail = ""
        self._is_over = False

    def __call__(self, progress: Progress) -> None:
        """Take note of a report, unless the start is over: a later load may report, too."""
        if self._is_over:
            return
        if progress.stage != self._stage:
            # Some stages report only when they end; the report says how long they have taken by then.
            began = max(self._stage_began, self._clock() - progress.seconds)
            self._end_stage(began)
            self._stage, self._stage_began = progress.stage, began
        self._detail = progress.detail

    def ready(self) -> None:
        """Log the last stage, and that the engine core takes requests."""
        now = self._clock()
        self._end_stage(now)
        self._is_over = True
        logger.info("start: takes requests after %.2f s", now - self._began)

    def _end_stage(self, now: float) -> None:
        detail = f" ({self._detail})" if self._detail else ""
        logger.info("start: %s took %.2f s%s", self._stage, now - self._stage_began, detail)


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"
