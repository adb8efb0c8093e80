"""Faults that were mended once, to be brought back: the simulation has to find them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nbengine.client.routing.core_table import CoreTable
from nbengine.client.utility_calls import UtilityCalls
from nbengine.engine import __main__ as engine_main
from nbengine.engine.core import main as core_main
from nbengine.engine.host.leases import LeaseTable
from nbengine.ipc import liveness
from nbengine.ipc.shortage import Setbacks
from tests.simulation import state
from tests.simulation.hub import WALL_OFFSET
from tests.simulation.machine import CLOCK_TICKS


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault: what stands in the place of an attribute of some things, made from what is there."""

    name: str
    things: tuple[Any, ...]
    attribute: str
    make: Callable[[Any], Any]
    kinds: tuple[str, ...]
    """Kinds of faults outside that bring it to light."""
    within: int
    """Seeds among which it is found."""
    says: tuple[str, ...]
    """Parts of messages; the violation has one of them."""
    first: int = 0
    """The first of these seeds."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Bring the fault back."""
        right = [getattr(thing, self.attribute) for thing in self.things]
        for thing, value in zip(self.things, right, strict=True):
            setattr(thing, self.attribute, self.make(value))
        try:
            yield
        finally:
            for thing, value in zip(self.things, right, strict=True):
                setattr(thing, self.attribute, value)


def _deaf_to_those_who_leave(lose: Callable[..., None]) -> Callable[..., None]:
    """Plant the fault that calls of a core that has left in good order wait for ever."""

    def lose_the_dead(self: UtilityCalls, rank: int, cause: str) -> None:
        if cause != "it has gone":
            lose(self, rank, cause)

    return lose_the_dead


def _known_by_the_wall_clock(look: Callable[[int], Any]) -> Callable[[int], Any]:
    """Plant the fault that the start of a process is computed from the time of day, as psutil does."""

    def look_at_the_clock(pid: int) -> Any:
        seen = look(pid)
        step = state.hub().wall_offset - WALL_OFFSET
        return seen and seen._replace(started=seen.started + int(step * CLOCK_TICKS))

    return look_at_the_clock


def _heartbeats_alone(look: Callable[..., Any]) -> Callable[..., Any]:
    """Plant the fault that a lease lapses though its process is seen running."""

    def look_for_ends(self: LeaseTable, now: float) -> Any:
        heard = [(lease, lease.last_seen) for lease in self.leases]
        ended = look(self, now)
        for lease, last_seen in heard:
            lease.last_seen = last_seen
        return ended

    return look_for_ends


def _for_whatever_lease(on_connected: Callable[..., None]) -> Callable[..., None]:
    """Plant the fault that a connection is taken to be for the lease that the client knows of when it hears
    of it."""

    def without_epoch(self: CoreTable, rank: int, incarnation: int, epoch: int) -> None:
        on_connected(self, rank, incarnation, self._epoch)

    return without_epoch


def _at_a_loss(note: Callable[..., float]) -> Callable[..., float]:
    """Plant the fault that what meets a shortage is not tried again."""

    def give_up(self: Setbacks, error: BaseException) -> float:
        raise error

    return give_up


PLANTED = (
    Planted(
        "shortages-that-end-all",
        (Setbacks,),
        "note",
        _at_a_loss,
        ("files",),
        100,
        ("Too many open files", "without a reason", "exited with status"),
    ),
    Planted(
        "identity-by-the-wall-clock",
        (liveness,),
        "_look",
        _known_by_the_wall_clock,
        ("clock",),
        30,
        ("is gone", "without a reason", "without a fault"),
    ),
    Planted(
        "leases-by-heartbeats-alone",
        (LeaseTable,),
        "_look",
        _heartbeats_alone,
        ("hold",),
        100,
        ("no heartbeat",),
    ),
    Planted(
        "connections-without-epochs",
        (CoreTable,),
        "on_connected",
        _for_whatever_lease,
        ("stop",),
        150,
        ("waiting for a new lease", "waiting for the scaling", "waiting for client", "did not connect"),
        250,
    ),
    Planted(
        "calls-to-cores-that-leave",
        (UtilityCalls,),
        "lose",
        _deaf_to_those_who_leave,
        (),
        100,
        ("waiting for an answer",),
        first=400,
    ),
    Planted(
        "cores-that-remove-nothing",
        (engine_main, core_main),
        "remove_core_files",
        lambda _: lambda info: None,
        ("kill",),
        100,
        ("at the end there still are",),
        100,
    ),
)
