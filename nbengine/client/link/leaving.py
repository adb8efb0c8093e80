"""The return of leases at the interpreter's exit."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

EXIT_TIMEOUT = 0.5
"""Seconds that the interpreter's exit may be delayed."""


class Leaver(Protocol):
    """A link that can give its lease back."""

    @property
    def is_mine(self) -> bool:
        """Tell whether this process has made the link, and is no fork of the process that has."""

    def request_detach(self) -> None:
        """Ask the host to take the lease back, without waiting."""

    def join(self, timeout: float) -> None:
        """Wait for the end of the link's thread, at most `timeout` seconds."""


_links: weakref.WeakSet[Leaver] = weakref.WeakSet()


def leave_at_exit(link: Leaver) -> None:
    """Have a link give its lease back at the interpreter's exit.

    A bound engine sees the exit itself, on its pipe.
    """
    _links.add(link)


def _leave_all() -> None:
    links = [link for link in _links if link.is_mine]
    for link in links:
        link.request_detach()
    for link in links:
        link.join(EXIT_TIMEOUT)


atexit.register(_leave_all)
