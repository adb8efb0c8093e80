"""Where the workers of an engine find each other: a store of torch.distributed, reached before anything waits for long."""

from __future__ import annotations

import ipaddress
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import psutil
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from nbengine.distributed.layout import RankLayout
from nbengine.errors import EngineStartError, InvalidArgumentError
from nbengine.ipc.transport import own_address

_ALLOWED = "None, 'tcp://HOST:PORT' or 'file://PATH'"


@dataclass(frozen=True)
class Party:
    """Who meets: the one number `rank` of `size`, and who `serves` the store where there must be a server."""

    rank: int
    size: int
    serves: bool
    name: str
    """Of this one, as in "rank 1"."""
    others: str
    """Whom it meets, as in "the 4 workers"."""
    argument: str
    """What says where."""
    place: str = ""
    """Which of several parties that meet there."""
    num_guests: int = 0
    """Of all these parties together."""

    @classmethod
    def of_workers(cls, layout: RankLayout) -> Party:
        """The workers of one engine core."""
        rank, size = layout.rank, layout.world_size
        return cls(rank, size, rank == 0, f"rank {rank}", f"the {size} workers", "distributed_init_method")

    @classmethod
    def of_engine_cores(cls, layout: RankLayout) -> Party:
        """The workers that have one place in all engine cores; one worker serves those of all places."""
        rank, size = layout.dp_rank, layout.dp_size
        return cls(
            rank,
            size,
            rank == layout.rank == 0,
            f"{layout} of engine core {rank}",
            f"the {size} engine cores",
            "data_parallel_init_method",
            f"pp{layout.pp_rank}-tp{layout.tp_rank}",
            size * layout.world_size,
        )


class Rendezvous:
    """A store that a whole party has come to.

    Its keys begin with `token`, which only this party has: what an earlier engine left at the same place is not theirs.

    Raises:
        InvalidArgumentError: `init_method` is no place.
        EngineStartError: it is taken or cannot be reached, or a rank has not come within `timeout` seconds.
    """

    def __init__(self, init_method: str, party: Party, token: str, timeout: float) -> None:
        self._init_method = init_method
        self._party = party
        self._end = time.monotonic() + timeout
        self._timeout = timeout
        parts = urlsplit(init_method)
        self.host = parts.hostname
        """Machine of the server, if there is one."""
        self.is_local = parts.scheme == "file" or _is_loopback(parts.hostname)
        """Whether all ranks are on this machine for certain."""
        if parts.scheme == "file":
            store = self._open_file(parts.netloc + parts.path)
        elif parts.scheme == "tcp":
            store = self._connect(*self._host_and_port())
        else:
            raise InvalidArgumentError(party.argument, init_method, _ALLOWED)
        self._all = PrefixStore(token, store)
        self.store = PrefixStore(party.place, self._all) if party.place else self._all
        self.meet("start")

    def meet(self, name: str) -> None:
        """Return when all ranks have called this with the same, new `name`.

        Raises:
            EngineStartError: one has not within what is left of the time.
        """
        self.share(name, "")

    def share(self, name: str, value: str) -> list[str]:
        """All ranks' values for a new `name`, by rank; see `meet`."""
        keys = [f"{name}/{rank}" for rank in range(self._party.size)]
        try:
            self.store.set(keys[self._party.rank], value)
            self.store.wait(keys, self._left())
            return [self.store.get(key).decode() for key in keys]
        except RuntimeError as error:
            reason = self._missing(keys) if time.monotonic() >= self._end else str(error)
            raise self._refusal(reason) from error

    def leave(self) -> None:
        """Say that this one needs the store no more; the server is there until no party does.

        Raises:
            EngineStartError: one still does when the time is over.
        """
        if self.host is None:
            return
        try:
            if self._all.add("left", 1) == self._party.num_guests:
                self._all.set("all left", "")
            if self._party.serves:
                self._all.wait(["all left"], self._left())
        except RuntimeError as error:
            raise self._refusal(str(error)) from error

    def _missing(self, keys: list[str]) -> str:
        try:
            missing = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:
            # The rank that keeps the store has given up already.
            missing = []
        ranks = "a rank" if not missing else ("rank " if len(missing) == 1 else "ranks ") + ", ".join(missing)
        return f"{ranks} did not come within {self._timeout:g} s"

    def _open_file(self, path: str) -> Store:
        try:
            # torch would try for minutes to open a file that cannot be made.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise self._refusal(str(error)) from error
        return FileStore(path, self._party.size)

    def _connect(self, host: str, port: int) -> Store:
        listener = None
        if self._party.serves:
            try:
                # torch's own would listen on every interface.
                listener = socket.create_server((host, port), family=_family(host), backlog=128)
            except OSError as error:
                raise self._refusal(str(error)) from error
        descriptor = None if listener is None else listener.detach()

        def connect() -> Store:
            return TCPStore(
                host,
                port,
                None,
                is_master=descriptor is not None,
                timeout=self._left(),
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )

        return self._bounded(connect)

    def _bounded(self, connect: Callable[[], Store]) -> Store:
        """What `connect` returns, unless it hangs, as torch does before a server that is none of its own."""
        results: queue.Queue[Store | Exception] = queue.Queue()

        def run() -> None:
            try:
                results.put(connect())
            except RuntimeError as error:
                results.put(error)

        threading.Thread(target=run, name="nbengine-rendezvous", daemon=True).start()
        try:
            result = results.get(timeout=self._timeout)
        except queue.Empty:
            raise self._refusal(f"no answer within {self._timeout:g} s") from None
        if isinstance(result, Exception):
            raise self._refusal(str(result).splitlines()[0]) from result
        return result

    def _left(self) -> timedelta:
        # torch takes 0 for no limit.
        return timedelta(seconds=max(self._end - time.monotonic(), 0.001))

    def _host_and_port(self) -> tuple[str, int]:
        parts = urlsplit(self._init_method)
        try:
            port = parts.port
        except ValueError:
            port = None
        if not parts.hostname or not port:
            raise InvalidArgumentError(self._party.argument, self._init_method, _ALLOWED)
        return parts.hostname, port

    def _refusal(self, reason: str) -> EngineStartError:
        party = self._party
        return EngineStartError(
            f"{party.name} could not join {party.others} at {party.argument}={self._init_method!r}: {reason}"
        )


def loopback_interface() -> str | None:
    """Name of the interface that leads to this machine alone, if it goes by a usual name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def interface_towards(host: str | None) -> str | None:
    """Name of the interface whose address is this machine's on the way to `host`."""
    address = own_address(host)
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(each.address == address for each in addresses)
        ),
        None,
    )


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
