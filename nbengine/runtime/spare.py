"""Spare processes: an engine's host and first core, which have imported what they need and wait for their engine.

A notebook starts a spare host when it loads the extension, and the spare host a spare core. So the seconds that it
takes to import torch have passed when an engine is started. The line that a spare reads its order from is a pipe
whose other end its parent holds, and later its lifeline.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nbengine.ipc.private import opened

_MOST_BYTES = 4096
"""An empty pipe has room for this everywhere, so that writing does not block."""
_END = b"\n"
_PARENT_INTERVAL_MS = 1000


class HostOrder(msgspec.Struct, frozen=True):
    """The order to be the host of the engine of a run directory.

    `bound`: the engine ends with the process that has written the order.
    """

    run_dir: str
    log_path: str
    bound: bool


class CoreOrder(msgspec.Struct, frozen=True):
    """The order to be an engine core; `secret` proves to the host who it is."""

    run_dir: str
    log_path: str
    rank: int
    secret: bytes


Order = TypeVar("Order", HostOrder, CoreOrder)


def give_order(line: int, order: HostOrder | CoreOrder) -> None:
    """Write an order to a spare process, without blocking.

    Raises:
        OSError: the process has ended, or the order is too long.
    """
    content = msgspec.json.encode(order) + _END
    if len(content) > _MOST_BYTES:
        raise OSError(f"an order of {len(content)} bytes is longer than {_MOST_BYTES}")
    os.write(line, content)


class SpareProcess:
    """A spare process that this one has started: `process`, which ends when the pipe `line` is closed."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], line_variable: str, **options: Any
    ) -> None:
        """Start it; the variable `line_variable` tells it its end of the line, `options` are those of `Popen`.

        Raises:
            OSError: there is no room for another process.
        """
        theirs, self.line = os.pipe()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env={**environment, line_variable: str(theirs)},
                pass_fds=(theirs,),
                **options,
            )
        except BaseException:
            os.close(self.line)
            raise
        finally:
            os.close(theirs)

    def give(self, order: HostOrder | CoreOrder) -> bool:
        """Give it its order; return False if it cannot take one, and has ended then."""
        try:
            if self.process.poll() is None:
                give_order(self.line, order)
                return True
        except OSError:
            # It has just ended, or a path is too long for its line.
            pass
        self.close()
        return False

    def close(self) -> None:
        """End it, with what it has started, and wait until it has ended: it has nothing to clean up."""
        os.close(self.line)
        self.process.kill()
        self.process.wait()


def await_order(line: int, kind: type[Order]) -> Order | None:
    """Wait for the order and send this process's output to the engine's log from now on; None: nobody is left who
    could give one.

    Raises:
        OSError: the log cannot be opened.
    """
    parent = os.getppid()
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    while not waiting.poll(_PARENT_INTERVAL_MS):
        # A process that the parent has forked may hold its end of the line.
        if os.getppid() != parent:
            return None
    content = b""
    while not content.endswith(_END):
        part = os.read(line, _MOST_BYTES)
        if not part:
            return None
        content += part
    order = msgspec.json.decode(content, type=kind)
    sys.stdout.flush()
    sys.stderr.flush()
    with opened(Path(order.log_path), os.O_APPEND) as log:
        for standard in (1, 2):
            os.dup2(log, standard)
    return order
