"""The place where the workers of an engine find each other: a store of torch.distributed, which they reach
before any of them waits for long."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from nbengine.distributed.layout import RankLayout
from nbengine.errors import EngineStartError, InvalidArgumentError
from nbengine.ipc.transport import own_address

_ALLOWED = "None, 'tcp://HOST:PORT' or 'file://PATH'"
_TURN_SECONDS = 1.0
"""Seconds that a member waits for its turn to let go of a file; others may hold the lock of a folder that they can read."""


@dataclass(frozen=True)
class Party:
    """A member of a group that meets: number `rank` of `size`. It `serves` the store if that needs a server
    and this is the one."""

    rank: int
    size: int
    serves: bool
    name: str
    """The member's own name, as in "rank 1"."""
    others: str
    """The name of those whom it meets, as in "the 4 workers"."""
    argument: str
    """The name of the engine argument that says where they meet."""
    place: str = ""
    """A name that tells this group from others that meet at the same store."""
    num_guests: int = 0
    """The number of members of all groups at the store together."""

    @classmethod
    def of_workers(cls, layout: RankLayout) -> Party:
        """Make the member for a worker that meets the others of its engine core."""
        rank, size = layout.rank, layout.world_size
        return cls(
            rank,
            size,
            rank == 0,
            f"rank {rank}",
            f"the {size} workers",
            "distributed_init_method",
            num_guests=size,
        )

    @classmethod
    def of_engine_cores(cls, layout: RankLayout) -> Party:
        """Make the member for a worker that meets those of its place in all engine cores; one worker serves
        the workers of all places."""
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
    """A store that all members of a group have reached.

    Its keys begin with `token`, which only this group has: what an earlier engine left at the same place is
    not theirs.

    Raises:
        InvalidArgumentError: `init_method` does not name a place.
        EngineStartError: the place is taken or cannot be reached, or a rank has not come within `timeout`
            seconds.
    """

    def __init__(self, init_method: str, party: Party, token: str, timeout: float) -> None:
        self._init_method = init_method
        self._party = party
        self._end = time.monotonic() + timeout
        self._timeout = timeout
        parts = urlsplit(init_method)
        self.host = parts.hostname
        """The machine of the server, None if there is none."""
        self.is_local = parts.scheme == "file" or _is_loopback(parts.hostname)
        """True when all ranks are on this machine for certain."""
        self._path = Path(parts.netloc + parts.path)
        if parts.scheme == "file":
            store = self._open_file(str(self._path))
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
            EngineStartError: a rank has not done so within what is left of the time.
        """
        self.share(name, "")

    def share(self, name: str, value: str) -> list[str]:
        """Give this rank's value for a new `name` to the others and return all ranks' values, by rank; see
        `meet`."""
        keys = [f"{name}/{rank}" for rank in range(self._party.size)]
        try:
            self.store.set(keys[self._party.rank], value)
            self.store.wait(keys, self._left())
            return [self.store.get(key).decode() for key in keys]
        except RuntimeError as error:
            reason = self._missing(keys) if time.monotonic() >= self._end else str(error)
            raise self._refusal(reason) from error

    def leave(self) -> None:
        """Say that this member needs the store no more: nothing else can be asked of it. The server stays until no member
        does; a file is gone when the last one has left, unless torch still uses it.

        Raises:
            EngineStartError: a member still needs it when the time is over.
        """
        if self.host is None:
            self._let_go()
            return
        try:
            # Members of all groups at the server are counted together, so not under this group's `place`.
            if self._all.add("left", 1) == self._party.num_guests:
                self._all.set("all left", "")
            if self._party.serves:
                self._all.wait(["all left"], self._left())
        except RuntimeError as error:
            raise self._refusal(str(error)) from error

    def _let_go(self) -> None:
        """Let go of the file in turn: of two stores that end at a time torch takes neither for the last, which removes
        it."""
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(folder, time.monotonic() + _TURN_SECONDS)
            del self.store, self._all
        finally:
            os.close(folder)

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
                # torch's own listener would listen on every interface.
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
        """Return what `connect` returns, unless it hangs, as torch does in front of a server that is not a
        store."""
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


def _lock(folder: int, end: float) -> None:
    """Lock a folder by its descriptor, if that can be done before `end`."""
    while time.monotonic() < end:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
        else:
            return


def check_may_listen(rendezvous: Rendezvous, networked: bool) -> None:
    """Check that ranks may talk through gloo, whose only transport is TCP and which lets in everybody who
    connects.

    Raises:
        EngineStartError: the engine is not `networked`, and the ranks do not meet at an address that somebody
            has given.
    """
    if networked or rendezvous.host is not None:
        return
    raise EngineStartError(
        "the workers cannot exchange tensors through shared memory: llvmlite is not installed, or has no code generator for "
        "this processor. Without it they would listen on TCP ports that every user of this machine can reach; set "
        "data_parallel_address='127.0.0.1' if they may"
    )


def choose_interface(rendezvous: Rendezvous) -> None:
    """Let gloo and NCCL listen on the loopback alone if all ranks are on this machine, else on the interface
    towards the others.

    torch would take the interface for which this machine's name stands, and NCCL any: neither need lead to
    the others, and both can lead out. What the user has chosen stays.
    """
    interface = loopback_interface() if rendezvous.is_local else interface_towards(rendezvous.host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def loopback_interface() -> str | None:
    """Return the name of the interface that leads to this machine alone, None if it has no usual name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def interface_towards(host: str | None) -> str | None:
    """Return the name of the interface that has this machine's address on the way to `host`."""
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
