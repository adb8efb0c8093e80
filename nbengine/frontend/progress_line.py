"""A fetch or a start says how far it is: in a terminal in one line, in a notebook's cell stage by stage."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbengine.config import ParallelConfig
from nbengine.ipc.control_messages import Progress
from nbengine.runtime.progress import ProgressCallback
from nbengine.widgets.words import harmless

_LEAST_TITLE = 15
"""The characters of a title that are shown, however long the rest is."""


@contextmanager
def start_progress(title: str, parallel: ParallelConfig) -> Iterator[ProgressCallback | None]:
    """Show what the callback is told of a start: in a notebook's cell stage by stage, else as `progress_line`."""
    # Only a program that has imported IPython can be a kernel, and importing it takes a while.
    ipython = sys.modules.get("IPython")
    shell: Any = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        with progress_line(f"{title}:") as progress:
            yield progress
        return
    from nbengine.widgets.processes.progress import StartProgress

    with StartProgress(shell, title, parallel) as shown:
        yield shown.update
        shown.update(Progress("ready"))


@contextmanager
def progress_line(title: str, *, everywhere: bool = False) -> Iterator[ProgressCallback | None]:
    """Show on stderr what the callback is told: in a terminal as one line that changes, and is cleared in the
    end.

    Args:
        title: the beginning of the line.
        everywhere: where stderr is no terminal, write a line for each change instead of giving None.
    """
    stream = sys.stderr
    if stream is not None and stream.isatty():
        before, after, room = "\r\x1b[K", "", shutil.get_terminal_size().columns - 1
    elif stream is not None and everywhere:
        before, after, room = "", "\n", sys.maxsize
    else:
        yield None
        return
    shown = ""

    def show(progress: Progress) -> None:
        nonlocal shown
        share = "" if progress.fraction is None else f"{progress.fraction:.0%}"
        said = harmless(" ".join(filter(None, (progress.detail or progress.stage, share))))
        line = f"{_shortened(harmless(title), room - len(said) - 1)} {said}"[:room]
        if line != shown:
            shown = line
            stream.write(f"{before}{line}{after}")
            stream.flush()

    try:
        yield show
    finally:
        if shown and before:
            stream.write(before)
            stream.flush()


def _shortened(title: str, room: int) -> str:
    """Leave out the middle of a title, as of a long path, that would leave no room for what is said."""
    room = max(room, _LEAST_TITLE)
    if len(title) <= room:
        return title
    begin = room // 2
    return f"{title[:begin]}…{title[begin + 1 - room :]}"
