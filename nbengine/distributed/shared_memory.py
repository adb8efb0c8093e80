"""Memory that several workers of one machine have mapped, and how they wait for each other in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nbengine.errors import EngineStartError, PeerDiedError, QueueClosedError
from nbengine.ipc.liveness import ProcessWatch
from nbengine.ipc.private import make_shared, map_shared
from nbengine.kernels.cpu_flags import FLAG_BYTES, Patience
from nbengine.worker.cgroup import ControlGroup

_PAGE = 4096
_MANY_SPINS = 1000
"""About 20 µs."""
_FEW_SPINS, _FEW_YIELDS = 100, 5
_NAP_NANOSECONDS = 50_000_000


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """What another rank needs to map the memory: `num_flags` flags, then `data_bytes` of data."""

    path: str
    num_flags: int
    data_bytes: int

    @property
    def data_offset(self) -> int:
        """Where the data begins; before it are a word that says that it is over, and the flags."""
        return -(-(1 + self.num_flags) * FLAG_BYTES // _PAGE) * _PAGE

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.data_offset + self.data_bytes


class SharedMemory:
    """The memory, mapped; all zero at first. It goes with the last process that has it, once its file is unlinked."""

    def __init__(self, handle: MemoryHandle) -> None:
        self.handle = handle
        memory = map_shared(handle.path, handle.size)
        self._over = ctypes.c_int64.from_buffer(memory)
        self.address = ctypes.addressof(self._over)
        """Where the word lies that is not 0 anymore when it is over."""
        self.flags = self.address + FLAG_BYTES
        """Address of the first flag."""
        self.data: Tensor = torch.frombuffer(memory, dtype=torch.uint8)[handle.data_offset :]
        """[data_bytes] uint8."""

    @property
    def is_over(self) -> bool:
        """Whether a process has let go of the memory."""
        return self._over.value != 0

    def close(self) -> None:
        """Let go of it, and tell the others; it is unmapped with the last tensor that lies in it."""
        self._over.value = 1


def create_memory(directory: str, num_flags: int, data_bytes: int) -> MemoryHandle:
    """Make a file for `SharedMemory`, its owner's alone, in a directory that is private too.

    Raises:
        EngineStartError: there is no room for it.
    """
    path = os.path.join(directory, f"tensors-{secrets.token_hex(8)}")
    handle = MemoryHandle(path, num_flags, data_bytes)
    try:
        make_shared(path, handle.size).close()
    except OSError as error:
        raise EngineStartError(
            f"the {handle.size / 2**20:.1f} MiB of shared memory through which workers exchange tensors cannot be "
            f"had in {directory}: {error}"
        ) from error
    return handle


def unlink(handle: MemoryHandle) -> None:
    """Remove the file; who has mapped it keeps the memory. Again does nothing."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(handle.path)


class Peers:
    """The processes of other ranks that this one waits for, by rank, or as one calls them otherwise."""

    def __init__(self, watches: Mapping[int, ProcessWatch] | Mapping[str, ProcessWatch]) -> None:
        self._watches = watches

    def close(self) -> None:
        """Watch them no more."""
        for watch in self._watches.values():
            watch.close()

    def check(self, memory: SharedMemory) -> None:
        """Called now and then while one waits.

        Raises:
            PeerDiedError: one has ended.
            QueueClosedError: one has let go of the memory.
        """
        for rank, watch in self._watches.items():
            if watch.gone():
                raise PeerDiedError(f"the worker of rank {rank} is gone: process {watch.pid} has ended")
        if memory.is_over:
            ranks = ", ".join(map(str, self._watches))
            raise QueueClosedError(f"a worker among ranks {ranks} does not exchange tensors anymore")


def patience(memory: SharedMemory, *, short: bool) -> Patience:
    """How to wait: short waits are spent looking, if there is a core for that; else one sleeps almost at once."""
    spins, yields = (_MANY_SPINS, 0) if short else (_FEW_SPINS, _FEW_YIELDS)
    return Patience(
        spins=spins, yields=yields, abort=memory.address, nap_seconds=0, nap_nanoseconds=_NAP_NANOSECONDS
    )


def num_cores() -> int:
    """Cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, ControlGroup().cpu_limit() or cores)
