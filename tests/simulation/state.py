"""The world that runs: there is one at a time, which the substitutes find here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.hub import Hub
    from tests.simulation.processes import Process
    from tests.simulation.world import World

_world: World | None = None
_hub: Hub | None = None


def enter(world: World) -> None:
    """Make a world the one that runs."""
    global _world, _hub
    _world, _hub = world, world.hub


def leave() -> None:
    """Leave the world, so that there is none any more."""
    global _world, _hub
    _world = _hub = None


def world() -> World:
    """The world that runs."""
    assert _world is not None, "no world runs"
    return _world


def hub() -> Hub:
    """Return the hub of the world that runs."""
    assert _hub is not None, "no world runs"
    return _hub


def process() -> Process:
    """The simulated process whose thread runs."""
    assert _hub is not None, "no world runs"
    task = _hub.current
    assert task is not None, "no simulated thread runs"
    return task.process


def process_or_none() -> Process | None:
    """Return the simulated process whose thread runs; None where none does."""
    return None if _hub is None or _hub.current is None else _hub.current.process


def is_running() -> bool:
    """Return whether there is a world, and it has not ended."""
    return _hub is not None and not _hub.closed
