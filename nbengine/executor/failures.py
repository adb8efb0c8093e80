"""How workers fail, and which of several failures was the first cause."""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGABRT

from nbengine.distributed.layout import RankLayout
from nbengine.engine.logs import describe_exception
from nbengine.engine.processes import describe_status
from nbengine.errors import EngineStartError, NBEngineError, PeerDiedError, QueueClosedError

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0
"""How long one waits for the cause when all that is known is that workers have lost another one."""
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted|lost)|broken pipe|remote process exited"
    r"|timed out waiting|socket closed",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker says of an exception; can always be pickled."""

    doing: str
    """What it was doing: "start", or the method that was called."""
    description: str
    """One line, with what caused it."""
    traceback: str
    pickled: bytes
    """The exception; empty if it does not survive pickling."""

    @classmethod
    def of(cls, doing: str, error: Exception) -> WorkerReport:
        """Report an exception that has just been caught."""
        lines = "".join(traceback.format_exception(error))
        return cls(doing, describe_exception(error), lines, _pickled(error))

    @property
    def error(self) -> Exception:
        """The exception, or an `NBEngineError` in its place if this process cannot have it."""
        if self.pickled:
            # Its class may be one that is not to be found here, and its code may raise anything.
            with contextlib.suppress(Exception):
                error: Exception = pickle.loads(self.pickled)
                return error
        return NBEngineError(self.description)

    @property
    def is_lost_peer(self) -> bool:
        """Whether it says no more than that another worker or the engine core could not be reached."""
        lost = isinstance(self.error, (PeerDiedError, QueueClosedError, ConnectionError, EOFError))
        return lost or _LOST_PEER.search(self.description) is not None

    def log(self, worker: str) -> None:
        """Write it to the log; the traceback only of what was not raised on purpose."""
        level = logging.DEBUG if isinstance(self.error, NBEngineError) else logging.ERROR
        logger.log(level, "%s failed in %s:\n%s", worker, self.doing, self.traceback)


def _pickled(error: Exception) -> bytes:
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        copy = pickle.loads(pickled)
        if type(copy) is type(error) and str(copy) == str(error):
            return pickled
    return b""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """The end of one worker, by its own report or, without one, by its exit status."""

    layout: RankLayout
    pid: int
    report: WorkerReport | None = None
    status: int = 0
    """`Popen.returncode`."""
    how: str = ""
    """How it ended, where that says more than the status."""

    @property
    def worker(self) -> str:
        """Which one it is, as in "worker 1 (TP1)"."""
        return worker_name(self.layout)

    @property
    def certainty(self) -> int:
        """2: it failed by itself. 1: it may have, or because another one did. 0: it lost another one."""
        if self.report is not None:
            return 0 if self.report.is_lost_peer else 2
        return 2 if self.status < 0 and self.status != -SIGABRT else 1

    def describe(self) -> str:
        """One sentence: which worker, its pid, and how it ended."""
        who = f"{self.worker}, pid {self.pid},"
        if self.report is None:
            return f"{who} {self.how or describe_status(self.status)}"
        return f"{who} failed in {self.report.doing}: {self.report.description}"

    def start_error(self, log_tail: str) -> NBEngineError:
        """What to raise when it keeps the engine from starting.

        What the worker has raised on purpose stays what it was. Only where it may differ between workers, the
        error names this one.
        """
        error = None if self.report is None else self.report.error
        if isinstance(error, EngineStartError):
            return EngineStartError(f"{self.worker}: {error.cause}", error.log_tail or log_tail)
        if isinstance(error, NBEngineError):
            return error
        phase = "at the start, " if self.report is None else ""
        return EngineStartError(f"{phase}{self.describe()}", log_tail)


def worker_name(layout: RankLayout) -> str:
    """A worker's number and place, as in "worker 3 (TP1 PP1)"."""
    return f"worker {layout.rank} ({layout})" if layout.world_size > 1 else f"worker {layout.rank}"


class FirstCause:
    """Finds the first cause among failures as they become known: a state machine without I/O.

    A failure that a worker can only have brought about by itself is the cause at once. Where workers report only
    that they lost another one, that one's own end is waited for.
    """

    def __init__(self) -> None:
        self._failures: list[WorkerFailure] = []
        self._settled_at: float | None = None

    def add(self, failure: WorkerFailure, now: float) -> None:
        """Take in a failure; `now` is `time.monotonic()`. Of one worker's only the first counts."""
        if any(known.layout == failure.layout for known in self._failures):
            return
        self._failures.append(failure)
        if self._settled_at is None:
            self._settled_at = now + SETTLE_SECONDS

    def time_left(self, now: float) -> float | None:
        """Seconds until `decide` has an answer even without further failures; None if there is no failure."""
        return None if self._settled_at is None else max(0.0, self._settled_at - now)

    def decide(self, now: float) -> WorkerFailure | None:
        """The first cause, as soon as it is certain enough."""
        if self._settled_at is None:
            return None
        cause = choose_cause(self._failures)
        return cause if cause.certainty == 2 or now >= self._settled_at else None


def choose_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The first of those that are most certainly no consequence of another; `failures` in order of arrival."""
    return max(failures, key=lambda failure: failure.certainty)
