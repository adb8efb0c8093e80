"""The standard output and error of an engine's process: a log that cannot be written ends nothing."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from nbengine.ipc.private import reason_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LossyOutput(io.FileIO):
    """A stream to others' descriptor. Text that cannot be written is dropped, and never an error.

    When text can be written again, a line before it says how much is missing, and why.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._lost = 0
        self._reason = ""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write `data` or drop it, and return how many bytes were taken."""
        try:
            if self._lost:
                super().write(b"(%d bytes are missing here: %s)\n" % (self._lost, self._reason.encode()))
                self._lost = 0
            written: int | None = super().write(data)
            self._reason = "it took no more"
        except OSError as error:
            written = None
            self._reason = reason_of(error)
        if written is None:
            # A pipe that is full and does not block gives None without an error.
            written = memoryview(data).nbytes
            self._lost += written
        return written


def lose_what_cannot_be_written() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams with which printing to a full disk is no error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # The descriptor was closed when the process started.
            continue
        stream.flush()
        output = io.BufferedWriter(LossyOutput(stream.fileno()))
        setattr(
            sys,
            name,
            io.TextIOWrapper(output, stream.encoding, errors="backslashreplace", line_buffering=True),
        )
