"""The data-parallel group over torch.distributed: NCCL on GPUs, gloo on the CPUs of several machines."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from nbengine.distributed.row_counts import RowCounts, Word


class Words(Protocol):
    """The way in which ranks tell each other numbers that are needed on the host."""

    def share(self, word: Word, value: int) -> list[int]:
        """Give this rank's number to the others and return all ranks' numbers, by rank; they mean what `word`
        says."""

    def close(self) -> None:
        """Leave the others without waiting for them."""


class GlooWords:
    """`Words` over gloo."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def share(self, word: Word, value: int) -> list[int]:
        """See `Words.share`."""
        words = torch.empty(self._size, dtype=torch.int64)
        mine = torch.tensor([word.encode(value)])
        self._group._allgather_base(words, mine, c10d.AllgatherOptions()).wait()
        return word.decode(words.tolist())

    def close(self) -> None:
        """Do nothing: the group ends with `TorchDataParallelGroup`."""


class TorchDataParallelGroup:
    """A `DataParallelGroup` over its own process groups: it begins and ends while the workers' other groups
    go on.

    Each rank's tensor is filled up to the rows of the rank that has the most, as the collectives want it.
    Numbers of rows go through `words`, or else through gloo. `address` is the address of this machine at
    which gloo listens for the others.

    Raises of all calls:
        RuntimeError: torch has noticed that a rank that is waited for has gone.
        NBEngineError: the ranks do not make the same calls, or a tensor does not have the rows that were
            announced.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        address: str,
        timeout: timedelta,
        words: Words | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        # torch declares no types for its groups.
        self._groups: list[Any] = []
        # Where numbers go through shared memory, gloo is needed for nothing but a CPU's tensors.
        if words is None or device.type == "cpu":
            self._groups.append(_gloo(PrefixStore("words", store), rank, size, address, timeout))
        self._words: Words = words or GlooWords(self._groups[0], size)
        if device.type == "cuda":
            self._groups.append(_nccl(PrefixStore("tensors", store), rank, size, timeout))
        self._tensors = self._groups[-1]
        self._rows = RowCounts([0] * size, rank)

    def begin_step(self, num_tokens: int) -> None:
        """See `DataParallelGroup.begin_step`."""
        self._rows = RowCounts(self._words.share(Word.ROWS, num_tokens), self.rank)

    def gather(self, x: Tensor) -> Tensor:
        """See `DataParallelGroup.gather`."""
        rows = self._rows
        rows.check(len(x), own=True)
        # The total is the same on all ranks, so that none is alone in a collective call.
        if not rows.total:
            return x
        mine = _filled_up(x, rows.largest)
        all_rows = x.new_empty((self.size * rows.largest, *x.shape[1:]))
        self._tensors._allgather_base(all_rows, mine, c10d.AllgatherOptions()).wait()
        if rows.is_even:
            return all_rows
        parts = all_rows.view(self.size, rows.largest, *x.shape[1:])
        return torch.cat([part[:count] for part, count in zip(parts, rows.counts, strict=True)])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `DataParallelGroup.reduce_scatter`."""
        rows = self._rows
        rows.check(len(x), own=False)
        if not rows.total:
            return x
        if not rows.is_even:
            parts = torch.split(x, list(rows.counts))
            x = torch.cat([_filled_up(part, rows.largest) for part in parts])
        mine = x.new_empty((rows.largest, *x.shape[1:]))
        self._tensors._reduce_scatter_base(mine, x.contiguous(), c10d.ReduceScatterOptions()).wait()
        return mine[: rows.own]

    def any(self, flag: bool) -> bool:
        """See `DataParallelGroup.any`."""
        return any(self._words.share(Word.FLAG, int(flag)))

    def broadcast(self, x: Tensor, source: int) -> None:
        """See `DataParallelGroup.broadcast`."""
        options = c10d.BroadcastOptions()
        options.rootRank = source
        self._tensors.broadcast([x], options).wait()

    def close(self) -> None:
        """See `DataParallelGroup.close`."""
        self._words.close()
        for group in self._groups:
            group.abort()


def _filled_up(x: Tensor, num_rows: int) -> Tensor:
    """Return `x` with `num_rows` rows; the content of the added ones does not matter."""
    if len(x) == num_rows:
        return x.contiguous()
    filled = x.new_zeros((num_rows, *x.shape[1:]))
    filled[: len(x)] = x
    return filled


def _gloo(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    kind: Any = c10d.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    options._devices = [kind.create_device(hostname=address)]
    return kind(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    kind: Any = c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, size, options)
