"""A line in a terminal that says how far a fetch or a start is."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nbengine.ipc.control_messages import Progress
from nbengine.runtime.progress import ProgressCallback
from nbengine.widgets.words import harmless

_LEAST_TITLE = 15
"""The characters of a title that are shown, however long the rest is."""


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
