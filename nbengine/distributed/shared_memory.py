"""Memory that several workers of one machine have mapped, and the way in which they wait for each other in
it."""

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
from nbengine.kernels.cpu.flags import FLAG_BYTES, Patience

_PAGE = 4096
_MANY_SPINS = 1000
"""This number of spins takes about 20 µs."""
_FEW_SPINS, _FEW_YIELDS = 100, 5
_NAP_NANOSECONDS = 50_000_000


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """The description of a memory with which another rank maps it: `num_flags` flags, then `data_bytes` of
    data."""

    path: str
    num_flags: int
    data_bytes: int

    @property
    def data_offset(self) -> int:
        """Return the offset of the data; before it are the flags and the word that says that the memory is no
        longer used."""
        return -(-(1 + self.num_flags) * FLAG_BYTES // _PAGE) * _PAGE

    @property
    def size(self) -> int:
        """Return the bytes of the file."""
        return self.data_offset + self.data_bytes


class SharedMemory:
    """The memory, mapped, all zero at first. It goes with the last process that has it, once its file is
    unlinked."""

    def __init__(self, handle: MemoryHandle) -> None:
        self.handle = handle
        memory = map_shared(handle.path, handle.size)
        self._over = ctypes.c_int64.from_buffer(memory)
        self.address = ctypes.addressof(self._over)
        """The address of the word that is 0 until a process lets go of the memory."""
        self.flags = self.address + FLAG_BYTES
        """The address of the first flag."""
        self.data: Tensor = torch.frombuffer(memory, dtype=torch.uint8)[handle.data_offset :]
        """The data, uint8 [data_bytes]."""

    @property
    def is_over(self) -> bool:
        """Return whether a process has let go of the memory."""
        return self._over.value != 0

    def close(self) -> None:
        """Let go of the memory and tell the others; it is unmapped with the last tensor that lies in it."""
        self._over.value = 1


def create_memory(directory: str, num_flags: int, data_bytes: int) -> MemoryHandle:
    """Make a file for `SharedMemory`, its owner's alone, in a directory that is private too.

    Raises:
        EngineStartError: there is no room for the memory.
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
    """Remove the file; those that have mapped it keep the memory. A second call does nothing."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(handle.path)


class Peers:
    """The processes of other ranks for which this one waits, by rank, or by the names that messages give
    them."""

    def __init__(self, watches: Mapping[int, ProcessWatch] | Mapping[str, ProcessWatch]) -> None:
        self._watches = watches

    def close(self) -> None:
        """Stop watching the processes."""
        for watch in self._watches.values():
            watch.close()

    def check(self, memory: SharedMemory) -> None:
        """Raise an error if a wait cannot end any more; called now and then while a rank waits.

        Raises:
            PeerDiedError: a process has ended.
            QueueClosedError: a process has let go of the memory.
        """
        for rank, watch in self._watches.items():
            if watch.gone():
                raise PeerDiedError(f"the worker of rank {rank} is gone: process {watch.pid} has ended")
        if memory.is_over:
            ranks = ", ".join(map(str, self._watches))
            raise QueueClosedError(f"a worker among ranks {ranks} does not exchange tensors anymore")


def patience(memory: SharedMemory, *, short: bool) -> Patience:
    """Choose how to wait: short waits are spent looking, if there is a core for that; else the waiter sleeps
    almost at once."""
    spins, yields = (_MANY_SPINS, 0) if short else (_FEW_SPINS, _FEW_YIELDS)
    return Patience(
        spins=spins, yields=yields, abort=memory.address, nap_seconds=0, nap_nanoseconds=_NAP_NANOSECONDS
    )
