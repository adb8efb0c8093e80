"""What a scheduler tells whoever follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nbengine.scheduler.output import SchedulerOutput
    from nbengine.scheduler.request import Request


class SchedulerObserver(Protocol):
    """Hears what a scheduler does, at once and in order; it must not change anything."""

    def added(self, request: Request) -> None:
        """A request waits from now on."""

    def preempted(self, request: Request) -> None:
        """A request has lost its blocks, and waits."""

    def finished(self, request: Request) -> None:
        """A request has ended and has lost its blocks."""

    def planned(self, plan: SchedulerOutput) -> None:
        """A step was planned."""

    def answered(self, plan: SchedulerOutput) -> None:
        """The outcome of a step has come, and is about to be taken in."""

    def settled(self) -> None:
        """What came with the latest `answered` has been taken in."""
