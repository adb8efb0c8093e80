"""Each process of an engine writes the stacks of its threads to its log when it gets a signal."""

from __future__ import annotations

import faulthandler
import signal

STACKS_SIGNAL = signal.SIGUSR2


def write_stacks_on_signal() -> None:
    """Make this process write the stacks of all its threads to stderr, its log, on `STACKS_SIGNAL`.

    That works even if the main thread is in code that never returns, or another thread holds the interpreter.
    """
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)
