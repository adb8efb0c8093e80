"""The changes that utility calls make in an engine core: pause, sleep, reset of the prefix cache, profile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbengine.checks import require
from nbengine.errors import NBEngineError, UtilityError
from nbengine.ipc.utilities import PAUSE_MODES, SLEEP_LEVELS, SLEEP_TAGS, ProfileReport
from nbengine.metrics.stats import SchedulerStats
from nbengine.scheduler.pause import PauseState

if TYPE_CHECKING:
    from nbengine.executor.base import Executor
    from nbengine.scheduler.scheduler import Scheduler

_ABORTED = "the engine was {} with mode='abort', which ends unfinished requests; ask again when it goes on"


@dataclass(slots=True)
class _Change:
    """A change to be made when no step is in flight; until then `hold` limits what the scheduler plans."""

    apply: Callable[[], Any]
    hold: PauseState = PauseState.PAUSED_ALL
    until_resumed: bool = False
    """True if a resumption calls the change off."""
    ends_computing: bool = False
    """True if the change waits until no other engine core needs this one."""
    future: Future[Any] = field(default_factory=Future)


class EngineControl:
    """The utilities that need the model to stand still. For the thread that steps.

    A change is made between two steps, when none is in flight: at once, or after the step that `advance`
    ends. The methods that make a change return its result, or a `Future` of it.

    Two things can hold requests back, independently: a pause, until `resume`, and sleep, until `wake_up`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        num_steps_in_flight: Callable[[], int],
        abort_all: Callable[[str], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._num_steps_in_flight = num_steps_in_flight
        self._abort_all = abort_all
        self._pause = PauseState.UNPAUSED
        self._sleep_level = 0
        self._is_kept_asleep = False
        self._given_back: set[str] = set()
        self._changes: deque[_Change] = deque()
        self.is_needed: Callable[[], bool] = lambda: False
        """Tells whether other engine cores need this one's weights, even if it has no requests."""
        self.utilities: dict[str, Callable[..., Any]] = {
            "pause_generation": self.pause,
            "resume_generation": self.resume,
            "is_paused": lambda: self._pause is not PauseState.UNPAUSED,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "is_sleeping": lambda: self.is_asleep,
            "reset_prefix_cache": self.reset_prefix_cache,
            "start_profile": self.start_profile,
            "stop_profile": self.stop_profile,
        }

    @property
    def holds_requests(self) -> bool:
        """Tell whether unfinished requests may have to wait for someone to resume or wake the engine."""
        return self._pause is not PauseState.UNPAUSED or self._sleep_level > 0 or bool(self._changes)

    @property
    def is_asleep(self) -> bool:
        """Tell whether the engine sleeps, so that the model cannot compute."""
        return self._sleep_level > 0

    @property
    def refuses_requests(self) -> bool:
        """Tell whether requests are refused instead of waiting until the engine wakes up."""
        return self._is_kept_asleep and self.is_asleep

    def describe(self, stats: SchedulerStats) -> SchedulerStats:
        """Add the states of pause and sleep to the statistics."""
        stats.is_paused = self._pause is not PauseState.UNPAUSED
        stats.sleep_level = self._sleep_level
        stats.is_kept_asleep = self.refuses_requests
        return stats

    def advance(self) -> None:
        """Make the changes whose time has come; to be called after each step."""
        while self._changes and self._is_quiet(self._changes[0]):
            change = self._changes.popleft()
            try:
                change.future.set_result(change.apply())
            except Exception as error:  # noqa: BLE001 (it reaches the caller of the utility)
                change.future.set_exception(error)
            self._set_pause_state()

    # Pausing.

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> Any:
        """Admit no further requests of any client until `resume`.

        Args:
            mode: of `PAUSE_MODES`: what becomes of unfinished requests. With "wait" those that have not begun
                wait.
            clear_cache: forget the prefix cache; requests that are kept then compute their tokens again.
        """
        require("mode", mode, mode in PAUSE_MODES, "one of " + ", ".join(PAUSE_MODES))
        self._pause = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        if mode == "abort":
            self._abort_all(_ABORTED.format("paused"))
        return self._submit(
            _Change(lambda: self._clear_cache() if clear_cache else None, self._pause, until_resumed=True)
        )

    def resume(self) -> None:
        """Go on after a pause; a sleeping engine still has to wake up."""
        self._pause = PauseState.UNPAUSED
        for change in [change for change in self._changes if change.until_resumed]:
            self._changes.remove(change)
            change.future.set_exception(UtilityError("the engine was resumed before it had paused"))
        self._set_pause_state()
        # The changes that were queued behind them may be possible now.
        self.advance()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Any:
        """Forget the prefix cache and return True, or return False while requests hold blocks.

        With `reset_running_requests` these give up their blocks and compute their tokens again.
        """
        if not reset_running_requests:
            return self._scheduler.reset_prefix_cache()
        return self._submit(_Change(lambda: self._scheduler.reset_prefix_cache(reset_running_requests=True)))

    # Sleeping.

    def sleep(self, level: int = 1, mode: str | None = None, hold: bool = False) -> Any:
        """Give memory back: the KV cache, and the weights on the device (level 1) or everywhere (level 2).

        Requests that come wait until `wake_up`, or are refused with `hold`; the latest call decides which. A
        deeper level than the present one gives back more, any other level changes nothing.

        Args:
            mode: of `PAUSE_MODES`: what becomes of unfinished requests; with None the engine refuses to sleep
                while it has any, except those that a pause holds back. Requests that are kept compute their
                tokens again.

        Raises:
            UtilityError: there are unfinished requests, and `mode` is None.
        """
        require("level", level, level in SLEEP_LEVELS and level is not True, "1 or 2")
        require("hold", hold, isinstance(hold, bool), "True or False")
        allowed = "None or one of " + ", ".join(PAUSE_MODES)
        require("mode", mode, mode is None or mode in PAUSE_MODES, allowed)
        if mode is None and (count := self._num_going_on()):
            raise UtilityError(
                f"the engine cannot sleep: {count} unfinished requests are not paused; "
                f"pass mode='abort', 'wait' or 'keep', or call pause_generation first"
            )
        if mode == "abort":
            self._abort_all(_ABORTED.format("put to sleep"))
        meanwhile = PauseState.PAUSED_NEW if mode == "wait" else PauseState.PAUSED_ALL
        change = _Change(lambda: self._fall_asleep(level, hold), meanwhile, ends_computing=True)
        return self._submit(change)

    def wake_up(self, tags: Sequence[str] | None = None) -> Any:
        """Restore what `sleep` gave back, or only what `tags` (of `SLEEP_TAGS`) name; the rest follows later.

        When everything is restored requests go on, unless the engine is paused.

        Raises:
            NBEngineError: there is not enough memory any more; the engine still sleeps.
            ModelLoadError: weights given up at level 2 cannot be read again; the engine still sleeps.
        """
        allowed = "None or a list of " + ", ".join(SLEEP_TAGS)
        is_list = not isinstance(tags, str)
        require("tags", tags, tags is None or (is_list and set(tags) <= set(SLEEP_TAGS)), allowed)
        return self._submit(_Change(lambda: self._wake_up(SLEEP_TAGS if tags is None else tags)))

    def _fall_asleep(self, level: int, hold: bool) -> None:
        self._is_kept_asleep = hold
        if level <= self._sleep_level:
            return
        self._clear_cache()
        before, self._sleep_level = self._sleep_level, level
        self._given_back = set(SLEEP_TAGS)
        try:
            self._executor.collective_rpc("sleep", (level,))
        except Exception:
            # Some workers may have fallen asleep, and the model needs all of them.
            if before:
                self._sleep_level = before
            else:
                self._wake_up(SLEEP_TAGS)
            raise

    def _wake_up(self, tags: Sequence[str]) -> None:
        for tag in SLEEP_TAGS:
            if tag in tags and tag in self._given_back:
                # All workers look whether there is room before any of them takes some.
                self._executor.collective_rpc("check_wake_up", (tag,))
                self._executor.collective_rpc("wake_up", (tag,))
                self._given_back.discard(tag)
        if not self._given_back:
            self._sleep_level = 0

    # Profiling.

    def start_profile(self, directory: str, max_steps: int) -> Any:
        """Record what the workers compute in the next steps, at most `max_steps` of them."""
        require("max_steps", max_steps, max_steps >= 1, "at least 1")
        return self._submit(_Change(lambda: self._start_profile(directory, max_steps)))

    def stop_profile(self) -> Any:
        """Write what has been recorded, and return a `ProfileReport`."""
        return self._submit(_Change(self._stop_profile))

    def _start_profile(self, directory: str, max_steps: int) -> None:
        self._executor.collective_rpc("start_profile", (directory, max_steps))

    def _stop_profile(self) -> ProfileReport:
        reports: list[ProfileReport] = self._executor.collective_rpc("stop_profile")
        paths = [path for report in reports for path in report.paths]
        return ProfileReport(paths, reports[0].num_steps, reports[0].summary)

    # The queue of changes.

    def _submit(self, change: _Change) -> Any:
        self._changes.append(change)
        self._set_pause_state()
        self.advance()
        return change.future.result() if change.future.done() else change.future

    def _is_quiet(self, change: _Change) -> bool:
        if self._num_steps_in_flight() or (change.ends_computing and self.is_needed()):
            return False
        return change.hold is PauseState.PAUSED_ALL or not self._scheduler.has_requests()

    def _set_pause_state(self) -> None:
        states = {self._pause}
        if self._sleep_level:
            states.add(PauseState.PAUSED_ALL)
        if self._changes:
            # Only the first change counts: one that waits for requests to end must not be held up by others.
            states.add(self._changes[0].hold)
        # The strictest state wins.
        for state in (PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED):
            if state in states:
                self._scheduler.set_pause_state(state)
                return

    def _num_going_on(self) -> int:
        """Count the unfinished requests that neither a pause nor sleep holds back."""
        if self._sleep_level or self._pause is PauseState.PAUSED_ALL:
            return 0
        if self._pause is PauseState.PAUSED_NEW:
            return len(self._scheduler.running)
        return self._scheduler.get_num_unfinished_requests()

    def _clear_cache(self) -> None:
        if not self._scheduler.reset_prefix_cache(reset_running_requests=True):
            raise NBEngineError("KV blocks are held by no request")
