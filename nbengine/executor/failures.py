"""The failures of workers, and the choice of the first cause among several."""

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
from nbengine.errors import EngineStartError, NBEngineError, PeerDiedError, QueueClosedError
from nbengine.runtime.logs import describe_exception
from nbengine.runtime.processes import describe_status

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0
"""Seconds to wait for the cause while it is only known that workers have lost another one."""
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted|lost)|broken pipe|remote process exited"
    r"|timed out waiting|socket closed",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's report of an exception, which can always be pickled."""

    doing: str
    """The work that the worker was doing: "start", or the method that was called."""
    description: str
    """One line about the exception and its causes."""
    traceback: str
    pickled: bytes
    """The pickled exception; empty if it does not survive pickling."""

    @classmethod
    def of(cls, doing: str, error: Exception) -> WorkerReport:
        """Report an exception that has just been caught."""
        lines = "".join(traceback.format_exception(error))
        return cls(doing, describe_exception(error), lines, _pickled(error))

    @property
    def error(self) -> Exception:
        """Return the exception, or an `NBEngineError` in its place if this process cannot unpickle it."""
        if self.pickled:
            # Its class may be missing here, and its code may raise anything.
            with contextlib.suppress(Exception):
                error: Exception = pickle.loads(self.pickled)
                return error
        return NBEngineError(self.description)

    @property
    def is_lost_peer(self) -> bool:
        """Tell whether the report only says that another worker or the engine core could not be reached."""
        lost = isinstance(self.error, (PeerDiedError, QueueClosedError, ConnectionError, EOFError))
        return lost or _LOST_PEER.search(self.description) is not None

    def log(self, worker: str) -> None:
        """Write the report to the log: as an error unless the exception was raised on purpose,
        which is only debugging output."""
        level = logging.DEBUG if isinstance(self.error, NBEngineError) else logging.ERROR
        logger.log(level, "%s failed in %s:\n%s", worker, self.doing, self.traceback)


def _pickled(error: Exception) -> bytes:
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        # Some exceptions can be pickled but not unpickled, or say something else afterwards.
        copy = pickle.loads(pickled)
        if type(copy) is type(error) and str(copy) == str(error):
            return pickled
    return b""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """The end of one worker, with its own report or, without one, its exit status."""

    layout: RankLayout
    pid: int
    report: WorkerReport | None = None
    status: int = 0
    """The exit status, as `Popen.returncode`."""
    how: str = ""
    """The way in which it ended, where that says more than the status."""

    @property
    def worker(self) -> str:
        """Name the worker, as in "worker 1 (TP1)"."""
        return worker_name(self.layout)

    @property
    def certainty(self) -> int:
        """Rate the failure as a first cause.

        2: the worker failed by itself. 1: it may have, or another one made it fail. 0: it lost another one.
        """
        if self.report is not None:
            return 0 if self.report.is_lost_peer else 2
        return 2 if self.status < 0 and self.status != -SIGABRT else 1

    def describe(self) -> str:
        """Say in one sentence which worker it was, its pid, and how it ended."""
        who = f"{self.worker}, pid {self.pid},"
        if self.report is None:
            return f"{who} {self.how or describe_status(self.status)}"
        return f"{who} failed in {self.report.doing}: {self.report.description}"

    def start_error(self, log_tail: str) -> NBEngineError:
        """Make the error to raise when this failure keeps the engine from starting.

        An error that the worker has raised on purpose stays as it was. Only where it may differ between
        workers, it names this worker.
        """
        error = None if self.report is None else self.report.error
        if isinstance(error, EngineStartError):
            return EngineStartError(f"{self.worker}: {error.cause}", error.log_tail or log_tail)
        if isinstance(error, NBEngineError):
            return error
        phase = "at the start, " if self.report is None else ""
        return EngineStartError(f"{phase}{self.describe()}", log_tail)


def worker_name(layout: RankLayout) -> str:
    """Name a worker by its number and place, as in "worker 3 (TP1 PP1)"."""
    return f"worker {layout.rank} ({layout})" if layout.world_size > 1 else f"worker {layout.rank}"


class FirstCause:
    """A state machine without I/O that finds the first cause among failures as they become known.

    A failure that a worker can only have caused by itself is the first cause at once. Where workers report
    only that they lost another one, the decision waits for that worker's own end.
    """

    def __init__(self) -> None:
        self._failures: list[WorkerFailure] = []
        self._settled_at: float | None = None

    def add(self, failure: WorkerFailure, now: float) -> None:
        """Take in a failure; `now` is `time.monotonic()`. Only the first failure of a worker counts."""
        if any(known.layout == failure.layout for known in self._failures):
            return
        self._failures.append(failure)
        if self._settled_at is None:
            self._settled_at = now + SETTLE_SECONDS

    def time_left(self, now: float) -> float | None:
        """Return the seconds until `decide` has an answer even without further failures;
        None without a failure."""
        return None if self._settled_at is None else max(0.0, self._settled_at - now)

    def decide(self, now: float) -> WorkerFailure | None:
        """Return the first cause as soon as it is certain enough, None before."""
        if self._settled_at is None:
            return None
        cause = choose_cause(self._failures)
        return cause if cause.certainty == 2 or now >= self._settled_at else None


def choose_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """Choose the first of the failures that are most certainly no consequence of another;
    they are in order of arrival."""
    # `max` returns the first of equals.
    return max(failures, key=lambda failure: failure.certainty)
