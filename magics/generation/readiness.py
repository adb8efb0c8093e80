"""This module wakes engines that sleep before a cell sends a request, and reports those that are paused."""

from __future__ import annotations

import time
from collections.abc import Iterable

from IPython.core.error import UsageError

from nbengine.magics.generation.waits import PATIENCE, Rousable
from nbengine.metrics.stats import SchedulerStats
from nbengine.widgets.words import print_quietly, seconds

SILENCE = 3.0
"""Seconds after `PATIENCE` in which an engine core that sleeps answers, whatever else the machine does."""


def make_ready(engines: Iterable[Rousable], *, can_wait: bool) -> bool:
    """Wake the engines that sleep; return whether any is paused, so the cell must not wait for its answer.

    Args:
        can_wait: the answer may come after the cell has ended.

    Raises:
        UsageError: an engine is kept asleep, or is paused and the cell cannot do without its answer.
        NBEngineError: an engine cannot be asked, or does not wake up.
    """
    # An engine core that computes does not report in time, and is awake.
    # The state of all engines is read before any is woken, so a refusal leaves the others asleep.
    known = {engine: _cores(engine) for engine in dict.fromkeys(engines)}
    for engine, cores in known.items():
        if any(core.is_kept_asleep for core in cores):
            raise UsageError(
                f"engine {engine.name!r} is kept asleep (`%engine sleep --hold`): `%engine wake {engine.name}` wakes it"
            )
    paused = [engine for engine, cores in known.items() if any(core.is_paused for core in cores)]
    if paused and not can_wait:
        raise UsageError(f"engine {paused[0].name!r} is paused: `%engine resume {paused[0].name}` first")
    for engine, cores in known.items():
        if any(core.is_sleeping for core in cores):
            _wake(engine)
    for engine in paused:
        print_quietly(
            f"engine {engine.name!r} is paused: the answer comes after `%engine resume {engine.name}`, "
            "and other cells can run until then"
        )
    return bool(paused)


def wake_if_asleep(engine: Rousable) -> None:
    """Wake an engine that sleeps, for a request that no cell waits for; one that is kept asleep refuses it.

    Raises:
        NBEngineError: the engine cannot be asked, or does not wake up.
    """
    cores = _cores(engine)
    if any(core.is_sleeping for core in cores) and not any(core.is_kept_asleep for core in cores):
        _wake(engine)


def _cores(engine: Rousable) -> list[SchedulerStats]:
    """Return the states of the engine cores that report them in time."""
    stats, silent = engine.stats_within(PATIENCE)
    if silent and not stats.engines and engine.stall is None:
        # Its cores sleep together, so one answer is enough. Without any they compute a long step, for which a
        # request waits in any case, or get no processor now.
        stats, _ = engine.stats_within(SILENCE)
    return stats.engines


def _wake(engine: Rousable) -> None:
    print_quietly(f"engine {engine.name!r} sleeps and is woken")
    began = time.monotonic()
    engine.control.wake_up()
    print_quietly(f"engine {engine.name!r} is awake after {seconds(time.monotonic() - began)}")
