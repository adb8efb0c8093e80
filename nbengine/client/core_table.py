"""Which engine cores take a client's requests, from what the host and the cores themselves tell. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Home(NamedTuple):
    """One start of one engine core."""

    rank: int
    incarnation: int


class CoreTable:
    """News of the ranks come on three connections, in any order between them: the host's, and each core's two.

    A rank takes requests when the host lists it (`set_ranks`), and when the incarnation that the host calls ready
    (`on_ready`) has connected to this client (`on_connected`), has not said good-bye (`on_farewell`) and has not handed
    requests back (`on_returned`). A message for a rank before that, or after, would be lost.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        """Listed by the host."""
        self.usable: dict[int, Home] = {}
        """By rank, those that take requests now."""
        self.restarting: frozenset[int] = frozenset()
        """Not listed, but to come back."""
        self._ready: dict[int, int] = {}
        self._connected: dict[int, int] = {}
        self._leaving: dict[int, int] = {}
        self._gone: set[Home] = set()

    @property
    def expected(self) -> Sequence[int]:
        """The ranks that a request may be meant for: they take it now, or will."""
        return sorted({*self.ranks, *self.restarting})

    @property
    def all_usable(self) -> bool:
        """Whether there are ranks and all of them take requests."""
        return bool(self.ranks) and len(self.usable) == len(self.ranks)

    def set_ranks(self, ranks: Sequence[int]) -> None:
        """The host has listed the ranks."""
        self.ranks = tuple(sorted(ranks))
        self.restarting -= set(ranks)
        self._update()

    def on_ready(self, rank: int, incarnation: int) -> None:
        """The host says that a rank is ready."""
        self._ready[rank] = incarnation
        self._update()

    def on_connected(self, rank: int, incarnation: int) -> None:
        """A core has announced itself."""
        self._connected[rank] = incarnation
        self._update()

    def on_returned(self, rank: int, incarnation: int) -> None:
        """A core hands requests back because it leaves: it takes no more."""
        # Cores do not wait for each other: what an earlier one says may come after what the next one does.
        self._leaving[rank] = max(incarnation, self._leaving.get(rank, incarnation))
        self._update()

    def on_farewell(self, rank: int, incarnation: int) -> None:
        """A core has said good-bye: what it has not answered it will not answer."""
        self._gone.add(Home(rank, incarnation))
        self._update()

    def on_lost(self, rank: int, incarnation: int, *, restarting: bool) -> None:
        """The host says that a core has ended."""
        if restarting and rank not in self.ranks:
            self.restarting |= {rank}
        self.on_farewell(rank, incarnation)

    def departed(self) -> list[Home]:
        """The cores that have gone and are not listed any more, or another in their place."""
        return [
            home
            for home in self._gone
            if home.rank not in self.ranks or self._ready.get(home.rank, home.incarnation) > home.incarnation
        ]

    def forget(self, home: Home) -> None:
        """A departed core has nothing left that is to be sent elsewhere."""
        if self._ready.get(home.rank, home.incarnation) > home.incarnation:
            self._gone.discard(home)

    def disconnect(self) -> None:
        """The lease is lost, and every connection with it."""
        self.ranks, self.restarting = (), frozenset()
        self._connected.clear()
        self._leaving.clear()
        self._gone.clear()
        self._update()

    def _update(self) -> None:
        usable = {}
        for rank in self.ranks:
            incarnation = self._ready.get(rank)
            if incarnation is None or self._connected.get(rank) != incarnation:
                continue
            home = Home(rank, incarnation)
            if self._leaving.get(rank) != incarnation and home not in self._gone:
                usable[rank] = home
        self.usable = usable
