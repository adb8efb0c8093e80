"""The logs of an engine's processes, and the last lines of one, which explain a failure."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from pathlib import Path

from nbengine.errors import EngineEndError, NBEngineError
from nbengine.ipc.private import opened_own

TAIL_LINES = 30
MAX_REPETITIONS = 100
REPETITION_WINDOW = 60.0
"""Seconds in which `MAX_REPETITIONS` messages of one kind are logged at most."""
_TAIL_BYTES = 32 * 1024
_START = " nbengine.engine.start_log: "
"""A text in each line that `nbengine.engine.start_log` writes."""
_FORMAT = "%(asctime)s %(levelname)s [{process}] %(name)s: %(message)s"


class RepetitionLimit(logging.Filter):
    """A filter that lets each message through `MAX_REPETITIONS` times in `REPETITION_WINDOW` seconds.

    Some messages are caused by a peer, which must not be able to fill a disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._window = 0.0
        self._seen: Counter[tuple[str, object]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is written; the last one that is says that more are left out."""
        # A new window begins also when the clock was set back.
        if not 0 <= record.created - self._window < REPETITION_WINDOW:
            self._window = record.created
            self._seen.clear()
        key = record.name, record.msg
        self._seen[key] += 1
        if self._seen[key] == MAX_REPETITIONS:
            record.msg = f"{record.msg} (more like this for {REPETITION_WINDOW:g} s are left out)"
        return self._seen[key] <= MAX_REPETITIONS


def configure_logging(process: str) -> None:
    """Log to stderr, which is the engine's log file; `NBENGINE_LOG_LEVEL` sets the level (default INFO)."""
    wanted = os.environ.get("NBENGINE_LOG_LEVEL", "INFO").upper()
    level = logging.getLevelNamesMapping().get(wanted)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if level is None else level,
        format=_FORMAT.format(process=process),
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepetitionLimit())
    if level is None:
        logging.getLogger(__name__).warning("NBENGINE_LOG_LEVEL=%s is not a log level, using INFO", wanted)


def log_tail(path: str | Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log file of this user's, empty if it cannot be read.

    They are to tell why something ended: the lines that a start writes about its stages are left out.
    """
    return "\n".join([line for line in _end_of(path) if _START not in line][-lines:])


def log_end(path: str | Path, lines: int, size: int | None = None) -> str:
    """Return the last lines of a log file of this user's as they are, empty if it cannot be read; with `size`, the
    last ones of its first `size` bytes."""
    return "\n".join(_end_of(path, size)[-lines:])


def log_size(path: str | Path) -> int:
    """Return the present size of a log file in bytes; 0 if it cannot be read."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def _end_of(path: str | Path, size: int | None = None) -> list[str]:
    try:
        with opened_own(path) as (descriptor, status):
            end = status.st_size if size is None else size
            start = max(0, end - _TAIL_BYTES)
            return os.pread(descriptor, end - start, start).decode(errors="replace").splitlines()
    except (OSError, NBEngineError):
        return []


def worker_log_path(log_path: str | Path, rank: int) -> Path:
    """Return the path of the log of a worker with its own process, beside its engine's log `log_path`."""
    path = Path(log_path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def describe_exception(error: BaseException) -> str:
    """Return one line about an exception and what caused it, root cause last."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        # A message often ends with the message of its cause.
        if not (parts and str(current) and str(current) in parts[-1]):
            parts.append(_describe_one(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "; caused by ".join(parts)


def _describe_one(error: BaseException) -> str:
    if isinstance(error, EngineEndError):
        return error.cause
    return str(error) if isinstance(error, NBEngineError) else f"{type(error).__name__}: {error}"
