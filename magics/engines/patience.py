"""A command of `%engine` that an engine cannot carry out at once says so."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nbengine.errors import NBEngineError
from nbengine.magics.generation.waits import LOOK_SECONDS, PATIENCE, Watched
from nbengine.widgets.words import count, print_quietly


@contextmanager
def told_if_slow(client: Watched, does: str) -> Iterator[None]:
    """Print a line, in the cell that runs, if the block takes longer than `LOOK_SECONDS`: that the engine `does`, "sleeps"
    for instance, as soon as it can."""
    context = contextvars.copy_context()
    ended = threading.Event()
    timer = threading.Timer(LOOK_SECONDS, context.run, (_tell, client, does, ended.is_set))
    timer.name = "nbengine-patience"
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        ended.set()
        timer.cancel()


def _tell(client: Watched, does: str, is_over: Callable[[], bool]) -> None:
    try:
        stats, silent = client.stats_within(PATIENCE)
    except NBEngineError:
        # The block raises this error to its caller.
        return
    num_running = sum(core.num_running_reqs for core in stats.engines)
    state = f": {count(num_running, 'request runs', 'requests run')}" if num_running else ""
    if silent and not stats.engines:
        state = ": it may be computing a long step"
    # Behind the block it would be news of the past.
    if not is_over():
        print_quietly(f"engine {client.name!r} {does} as soon as it can{state}")
