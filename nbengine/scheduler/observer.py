"""The protocol with which a scheduler tells its followers what it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
    from nbengine.scheduler.request import Request


class SchedulerObserver(Protocol):
    """An observer that hears what a scheduler does, at once and in order; it must not change anything."""

    def added(self, request: Request) -> None:
        """Hear that a request waits from now on."""

    def preempted(self, request: Request) -> None:
        """Hear that a request has lost its blocks, and waits again."""

    def finished(self, request: Request) -> None:
        """Hear that a request has ended and has lost its blocks."""

    def planned(self, plan: SchedulerOutput) -> None:
        """Hear that a step was planned."""

    def answered(self, plan: SchedulerOutput, answer: ModelRunnerOutput) -> None:
        """Hear that the outcome of a step, or of several that were computed at once, has come and is about to be taken
        in."""

    def settled(self) -> None:
        """Hear that the outcome of the latest `answered` has been taken in."""
