"""The waits of this process's worker for others, published so that a worker that holds all of them up can be
told from those that it holds up."""

from __future__ import annotations

from collections.abc import Callable


class PeerWaits:
    """A context manager around a wait for other workers. `tell` is called with True when it begins and with
    False when it ends; a process has at most one worker that waits for others."""

    def __init__(self) -> None:
        self.tell: Callable[[bool], None] = lambda _: None

    def __enter__(self) -> None:
        self.tell(True)

    def __exit__(self, *_: object) -> None:
        self.tell(False)


peer_waits = PeerWaits()
