"""The states of a scheduler that can be paused."""

from __future__ import annotations

import enum


class PauseState(enum.Enum):
    """The part of its work that the scheduler does. Requests are taken and can be aborted in every state."""

    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()
    """Requests that have begun go on to their end, resumptions included; no other is admitted."""
    PAUSED_ALL = enum.auto()
    """Nothing is scheduled; requests keep their blocks."""
