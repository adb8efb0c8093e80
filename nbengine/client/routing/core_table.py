"""The table of engine cores that take a client's requests, from news of the host and of the cores.

It does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nbengine.checks import require
from nbengine.errors import InvalidTypeError
from nbengine.plain import plain


def checked_rank(rank: int | None, ranks: Sequence[int]) -> int | None:
    """Return the `data_parallel_rank` that a caller asks for, if the engine has it; safe on any thread.

    Raises:
        InvalidArgumentError: it is not one of `ranks`.
    """
    if rank is None:
        return None
    allowed = f"None, or a rank of the engine ({', '.join(map(str, ranks))})"
    found = plain(rank)
    if not isinstance(found, int) or isinstance(found, bool):
        raise InvalidTypeError("data_parallel_rank", rank, allowed)
    require("data_parallel_rank", rank, found in ranks, allowed)
    return found


class Home(NamedTuple):
    """One start of one engine core."""

    rank: int
    incarnation: int


class CoreTable:
    """The ranks, of which news come on three connections, in any order between them:
    the host's, and each core's two.

    A rank takes requests when the host lists it (`set_ranks`), and when the incarnation that the host calls
    ready (`on_ready`) has connected to this client (`on_connected`), has not said good-bye (`on_farewell`)
    and has not handed requests back (`on_returned`). A message for a rank before that, or after, would be
    lost.

    A connection is made for one lease, whose number (`epoch`) only grows. The client may hear of a core that
    connects for a later lease before it hears of that lease, or even of the end of the one before. A good-bye
    and requests handed back concern the core itself, and mean the same under any lease.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        """The ranks that the host lists."""
        self.usable: dict[int, Home] = {}
        """The cores that take requests now, by rank."""
        self.restarting: frozenset[int] = frozenset()
        """Ranks that are not listed, but will come back."""
        self._ready: dict[int, int] = {}
        self._epoch = 0
        """The number of the lease that is held, or was held last."""
        self._connected: dict[int, tuple[int, int]] = {}
        """The newest epoch and incarnation that have connected, by rank."""
        self._heard: dict[int, int] = {}
        """The newest incarnation that has sent outputs, be they empty, by rank."""
        self._leaving: dict[int, int] = {}
        self._gone: set[Home] = set()

    @property
    def expected(self) -> Sequence[int]:
        """Return the ranks that a request may be meant for: they take it now, or will."""
        return sorted({*self.ranks, *self.restarting})

    @property
    def all_usable(self) -> bool:
        """Tell whether the host lists ranks and all of them take requests."""
        return bool(self.ranks) and len(self.usable) == len(self.ranks)

    @property
    def all_connected(self) -> bool:
        """Tell whether all take requests, and have greeted this client on the connection of their outputs.

        Then this process has accepted every connection until a core joins or a lease is renewed: libzmq ends
        a process that has no descriptor left for a connection to one of its `ipc://` sockets.
        """
        return self.all_usable and all(
            self._heard.get(rank) == home.incarnation for rank, home in self.usable.items()
        )

    def set_ranks(self, ranks: Sequence[int]) -> None:
        """Take in the ranks that the host lists."""
        self.ranks = tuple(sorted(ranks))
        self.restarting -= set(ranks)
        self._update()

    def on_ready(self, rank: int, incarnation: int) -> None:
        """Take note that the host calls a rank ready."""
        self._ready[rank] = incarnation
        self._update()

    def begin_lease(self, epoch: int) -> None:
        """Begin a lease: connections that were made for an earlier one do not count any more."""
        self._epoch = epoch
        self._update()

    def on_connected(self, rank: int, incarnation: int, epoch: int) -> None:
        """Take note that a core has announced itself on a connection for the lease `epoch`."""
        self._connected[rank] = max((epoch, incarnation), self._connected.get(rank, (0, 0)))
        self._update()

    def on_heard(self, rank: int, incarnation: int) -> bool:
        """Take note that outputs of a core have come; return whether they are its first."""
        if self._heard.get(rank, -1) >= incarnation:
            return False
        self._heard[rank] = incarnation
        return True

    def on_returned(self, rank: int, incarnation: int) -> None:
        """Take note that a core hands requests back because it leaves: it takes no more."""
        # Incarnations do not wait for each other: a message of an earlier one may come after one of the next.
        self._leaving[rank] = max(incarnation, self._leaving.get(rank, incarnation))
        self._update()

    def on_farewell(self, rank: int, incarnation: int) -> None:
        """Take note that a core has said good-bye: it will answer nothing more."""
        self._gone.add(Home(rank, incarnation))
        self._update()

    def on_lost(self, rank: int, incarnation: int, *, restarting: bool) -> None:
        """Take note that the host says that a core has ended."""
        if restarting and rank not in self.ranks:
            self.restarting |= {rank}
        self.on_farewell(rank, incarnation)

    def departed(self) -> list[Home]:
        """List the cores that have gone and are not listed any more, or have a successor."""
        return [
            home
            for home in self._gone
            if home.rank not in self.ranks or self._ready.get(home.rank, home.incarnation) > home.incarnation
        ]

    def forget(self, home: Home) -> None:
        """Forget a departed core that has nothing left to be sent elsewhere."""
        if self._ready.get(home.rank, home.incarnation) > home.incarnation:
            self._gone.discard(home)

    def disconnect(self) -> None:
        """Take note that the lease is lost, and every connection that was made for it."""
        self.ranks, self.restarting = (), frozenset()
        self._update()

    def _update(self) -> None:
        usable = {}
        for rank in self.ranks:
            incarnation = self._ready.get(rank)
            if incarnation is None or self._connected.get(rank) != (self._epoch, incarnation):
                continue
            home = Home(rank, incarnation)
            if self._leaving.get(rank) != incarnation and home not in self._gone:
                usable[rank] = home
        self.usable = usable
