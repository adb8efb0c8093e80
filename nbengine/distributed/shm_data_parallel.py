"""The data-parallel group of CPU ranks on one machine, through memory that all of them have mapped."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nbengine.distributed.row_counts import RowCounts, Word
from nbengine.distributed.shared_memory import MemoryHandle, Peers, SharedMemory, create_memory
from nbengine.distributed.shm_exchange import ShmExchange
from nbengine.kernels.cpu.all_reduce import compile_all_gather
from nbengine.kernels.cpu.elements import ELEMENTS, supports
from nbengine.kernels.cpu.exchange import SLOTS
from nbengine.kernels.cpu.flags import Patience
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.rows import compile_gather_rows, compile_reduce_scatter_rows

MAX_SLOT_BYTES = 4 << 20
"""The most bytes of a slot: larger tensors take several rounds, each with a wait."""
_ALIGNMENT = 4096


class ShmDataParallelGroup:
    """A `DataParallelGroup`; `nbengine.kernels.cpu.rows` says how it works. Sums are float32 in rank order,
    rounded once.

    It waits as `ShmExchange` does. It is for one thread at a time.

    Raises of all calls:
        PeerDiedError: a rank that is waited for has ended.
        QueueClosedError: a rank that is waited for has closed its end.
        NBEngineError: the ranks do not make the same calls, or a tensor does not have the rows that were
            announced.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, patience: Patience, peers: Peers) -> None:
        self.rank = rank
        self.size = size
        self._exchange = ShmExchange(memory, rank, size, patience, peers)
        self._gather_words = compile_all_gather(size)
        self._gather_rows = compile_gather_rows(size)
        # Compiled functions get these by their addresses, so they live as long as the group.
        self._word = (ctypes.c_int64 * 1)()
        self._words = (ctypes.c_int64 * size)()
        self._starts = (ctypes.c_int64 * (size + 1))()
        self._rows = RowCounts([0] * size, rank)
        self._exchange.arguments.starts = ctypes.addressof(self._starts)

    @staticmethod
    def reserve(directory: str, size: int, max_tensor_bytes: int) -> MemoryHandle:
        """Make the memory of a group of `size` ranks, none of which has more than `max_tensor_bytes` in a
        step.

        Raises:
            EngineStartError: there is no room for the memory.
        """
        needed = max(1, -(-size * max_tensor_bytes // _ALIGNMENT)) * _ALIGNMENT
        return create_memory(directory, size, size * SLOTS * min(needed, MAX_SLOT_BYTES))

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile for a type, which takes some tenths of a second, once a process; otherwise the first use
        does."""
        if supports(dtype):
            compile_reduce_scatter_rows(self.size, ELEMENTS[dtype])

    def begin_step(self, num_tokens: int) -> None:
        """See `DataParallelGroup.begin_step`."""
        self._rows = RowCounts(self.share(Word.ROWS, num_tokens), self.rank)

    def gather(self, x: Tensor) -> Tensor:
        """See `DataParallelGroup.gather`."""
        rows = self._rows
        rows.check(len(x), own=True)
        return self._gathered(x.contiguous(), rows)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `DataParallelGroup.reduce_scatter`."""
        rows = self._rows
        rows.check(len(x), own=False)
        if not supports(x.dtype):
            return self._reduce_scatter_gathered(x, rows)
        x = x.contiguous()
        output = x.new_empty((rows.own, *x.shape[1:]))
        # The total is the same on all ranks, so that all of them exchange or none does.
        if rows.total:
            width = x.numel() // rows.total
            compiled = compile_reduce_scatter_rows(self.size, ELEMENTS[x.dtype])
            self._run(compiled, x, output, rows, width)
        return output

    def any(self, flag: bool) -> bool:
        """See `DataParallelGroup.any`."""
        return any(self.share(Word.FLAG, int(flag)))

    def broadcast(self, x: Tensor, source: int) -> None:
        """See `DataParallelGroup.broadcast`."""
        sizes = [x.nbytes if rank == source else 0 for rank in range(self.size)]
        self._place(RowCounts(sizes, self.rank).starts)
        # The source gathers, too, into a tensor that nobody reads.
        output = torch.empty_like(x) if self.rank == source else x
        self._exchange.arguments.output = output.data_ptr()
        self._exchange.run(self._gather_rows, x.data_ptr(), x.nbytes)

    def close(self) -> None:
        """See `DataParallelGroup.close`."""
        self._exchange.close()

    def _place(self, starts: list[int]) -> None:
        for index, start in enumerate(starts):
            self._starts[index] = start

    def share(self, word: Word, value: int) -> list[int]:
        """Return all ranks' numbers, by rank; they mean what `word` says."""
        self._word[0] = word.encode(value)
        arguments = self._exchange.arguments
        arguments.output = ctypes.addressof(self._words)
        arguments.width = ctypes.sizeof(self._word)
        self._exchange.run(self._gather_words, ctypes.addressof(self._word), ctypes.sizeof(self._word))
        return word.decode(self._words[:])

    def _gathered(self, x: Tensor, rows: RowCounts) -> Tensor:
        output = x.new_empty((rows.total, *x.shape[1:]))
        if rows.total:
            self._run(self._gather_rows, x, output, rows, output.nbytes // rows.total)
        return output

    def _reduce_scatter_gathered(self, x: Tensor, rows: RowCounts) -> Tensor:
        """Sum tensors of a type for which nothing can be compiled here: float16 on an old processor."""
        everything = RowCounts([rows.total] * self.size, self.rank)
        first, *rest = self._gathered(x.contiguous(), everything).view(self.size, *x.shape)
        total: Tensor = first.float()
        for term in rest:
            total = total + term
        return total[rows.starts[self.rank] :][: rows.own].to(x.dtype)

    def _run(self, function: Function, x: Tensor, output: Tensor, rows: RowCounts, width: int) -> None:
        """Exchange rows of `width` units, in which `function` counts."""
        self._place([start * width for start in rows.starts])
        self._exchange.arguments.output = output.data_ptr()
        # All ranks go through the rounds that the one with the most rows needs.
        self._exchange.run(function, x.data_ptr(), rows.largest * width)
