"""The communicator of CPU ranks on one machine, through memory that all of them have mapped."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from nbengine.distributed.communicator import Guard
from nbengine.distributed.shared_memory import MemoryHandle, Peers, SharedMemory, create_memory
from nbengine.distributed.shm_exchange import ShmExchange
from nbengine.distributed.shm_operations import ShmOperations
from nbengine.kernels.cpu.all_reduce import compile_all_gather, compile_all_reduce
from nbengine.kernels.cpu.elements import ELEMENTS, supports
from nbengine.kernels.cpu.exchange import SLOTS
from nbengine.kernels.cpu.flags import Patience

SLOT_BYTES = 1 << 20
"""The bytes of a rank's slot. Longer tensors take several rounds, each with a wait: with a quarter of this, 4
MiB take 1.3 to 2.7 times as long. Four times as much was no faster with three and four ranks."""
ONE_PHASE_BYTES = 128 << 10
"""Up to this many bytes a second phase costs more than it saves, with any number of ranks. With two ranks it
never saves: 1 MiB is summed in 101 µs in one phase and 105 µs in two; with three it is 159 and 117 µs, with
four (on two cores) 218 and 155 µs (`benchmarks/bench_all_reduce.py` has both against gloo, which takes 5 to
100 times as long)."""


class ShmCommunicator:
    """A `Communicator`; `nbengine.kernels.cpu.all_reduce` says how it works. Sums are float32 in rank order,
    rounded once.

    `all_reduce` overwrites a contiguous argument. While a rank waits it does not hold Python's lock, and
    gives way to signals several times a second. It is for one thread at a time.

    Raises of all calls:
        PeerDiedError: a rank that is waited for has ended.
        QueueClosedError: a rank that is waited for has closed its end.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, patience: Patience, peers: Peers) -> None:
        self.rank = rank
        self.size = size
        self.guard: Guard | None = None
        self._exchange = ShmExchange(memory, rank, size, patience, peers)
        self._gather = compile_all_gather(size)
        # Compiled functions get these by their addresses.
        self._flag = ctypes.c_uint8()
        self._flags = (ctypes.c_uint8 * size)()
        self._operations: ShmOperations | None = None

    @staticmethod
    def reserve(directory: str, size: int) -> MemoryHandle:
        """Make the memory of a group of `size` ranks.

        Raises:
            EngineStartError: there is no room for the memory.
        """
        return create_memory(directory, size, size * SLOTS * SLOT_BYTES)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile for a type, which takes some tenths of a second, once a process; otherwise the first use
        does."""
        if supports(dtype):
            compile_all_reduce(self.size, ELEMENTS[dtype])

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator.all_reduce`."""
        if not supports(x.dtype):
            return self._all_reduce_gathered(x)
        x = x.contiguous()
        compiled = compile_all_reduce(self.size, ELEMENTS[x.dtype])
        in_one = self.size == 2 or x.nbytes <= ONE_PHASE_BYTES
        function = compiled.one_phase if in_one else compiled.two_phases
        if self.guard is None:
            self._exchange.run(function, x.data_ptr(), x.numel())
        else:
            with self.guard():
                self._exchange.run(function, x.data_ptr(), x.numel())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Communicator.all_gather`."""
        x = x.contiguous()
        *rows, width = x.shape
        output = x.new_empty((*rows, width * self.size))
        addresses = x.data_ptr(), output.data_ptr()
        if self.guard is None:
            self._gather_bytes(*addresses, x.nbytes, width * x.itemsize)
        else:
            with self.guard():
                self._gather_bytes(*addresses, x.nbytes, width * x.itemsize)
        return output

    def any(self, flag: bool) -> bool:
        """See `Communicator.any`."""
        self._flag.value = flag
        self._gather_bytes(ctypes.addressof(self._flag), ctypes.addressof(self._flags), 1, 1)
        return any(self._flags)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.any(False)

    def operations(self) -> ShmOperations:
        """See `Communicator.operations`; they are compiled by the first call."""
        if self._operations is None:
            most = sys.maxsize if self.size == 2 else ONE_PHASE_BYTES // torch.float32.itemsize
            self._operations = ShmOperations(self._exchange, self.size, most)
        return self._operations

    def close(self) -> None:
        """See `Communicator.close`."""
        self._exchange.close()

    def _gather_bytes(self, x: int, output: int, num_bytes: int, width: int) -> None:
        """Gather `num_bytes` at the address `x`, in rows of `width` bytes, to the address `output`."""
        arguments = self._exchange.arguments
        arguments.output = output
        arguments.width = width
        self._exchange.run(self._gather, x, num_bytes)

    def _all_reduce_gathered(self, x: Tensor) -> Tensor:
        """Sum tensors of a type for which nothing can be compiled here: float16 on an old processor, and
        integers."""
        first, *rest = self.all_gather(x.flatten()).view(self.size, *x.shape)
        total: Tensor = first.float() if x.is_floating_point() and x.itemsize < 4 else first
        for term in rest:
            total = total + term
        return total.to(x.dtype)
