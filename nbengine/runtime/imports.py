"""Imports of large libraries, which the garbage collector need not look through."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def imports_that_stay() -> Iterator[None]:
    """Keep the objects that the block makes, and all that there are, out of the garbage collector's sight for good.

    torch makes a million of them. The collector would look through them while they are made, and in each full
    collection, of which a start has several; and it would write into pages that forked processes share.
    This is for the engine's own processes: garbage that others have made by now would stay, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def import_for_later(modules: Sequence[str]) -> None:
    """Import modules whose objects stay; one that cannot be imported is left to who needs it, and tells why."""
    with imports_that_stay():
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
