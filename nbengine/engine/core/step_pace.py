"""The pace of an engine core's steps, from which it follows how many are computed at once."""

from __future__ import annotations

from nbengine.scheduler.steps_at_once import ONE_STEP, StepsAllowed

SECONDS_AT_ONCE = 0.05
"""Most seconds for which steps are computed at once, by the time that the latest ones took."""


class StepPace:
    """The time that steps take; an executor computes up to `most` at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds = 0.0

    @property
    def allowed(self) -> StepsAllowed:
        """Return the steps that a plan may ask for."""
        if self._most == 1 or not self._seconds:
            return ONE_STEP
        return StepsAllowed(min(self._most, int(SECONDS_AT_ONCE / self._seconds)), self._seconds)

    def took(self, seconds: float, steps: int) -> None:
        """Take note of the time that some steps have taken together."""
        self._seconds = seconds / steps
