"""The communicator and links over torch.distributed: NCCL on GPUs, gloo on a CPU without shared memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from nbengine.distributed.communicator import Communicator, Guard
from nbengine.distributed.peer_waits import peer_waits

SENDS_IN_FLIGHT = 2


class TorchCommunicator:
    """A `Communicator` over a group of torch.distributed. On a GPU its calls are queued on the current
    stream.

    gloo and NCCL reduce each element in one place and pass the result on, so that all ranks get the same
    bits; they choose the order in which they add.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, flags: Communicator | None = None
    ) -> None:
        """Keep the group; flags go through `flags` if it is given. Otherwise they go through the group, and on a
        GPU a flag waits for what has been queued before."""
        self.rank = group.rank()
        self.size = group.size()
        self.guard: Guard | None = None
        self._group = group
        self._device = device
        self._flags = flags
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator.all_reduce`."""
        x = x.contiguous()
        with self._waiting():
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Communicator.all_gather`."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._waiting():
            dist.all_gather(parts, x, group=self._group)
        return torch.cat(parts, dim=-1)

    def any(self, flag: bool) -> bool:
        """See `Communicator.any`."""
        if self._flags is not None:
            return self._flags.any(flag)
        self._flag.fill_(flag)
        with peer_waits:
            dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group)
        return bool(self._flag.item())

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        on_gpu = self._device.type == "cuda"
        with peer_waits:
            dist.barrier(self._group, device_ids=[self._device.index] if on_gpu else None)

    def operations(self) -> None:
        """See `Communicator.operations`."""

    def close(self) -> None:
        """Close what flags go through; the group ends with `TorchWorld`."""
        if self._flags is not None:
            self._flags.close()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with nullcontext() if self.guard is None else self.guard(), peer_waits:
            yield


class TorchLink:
    """A `PipelineLink` to or from another rank.

    Tensors are copied before they are sent. On a GPU a send waits on NCCL's own stream for its receiver; the
    current stream goes on until `SENDS_IN_FLIGHT` are on their way, and then waits for the oldest of them.
    """

    def __init__(self, peer: int, device: torch.device) -> None:
        self._peer = peer
        self._device = device
        self._sends: deque[tuple[dist.Work | None, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """See `PipelineLink.send`."""
        if len(self._sends) == SENDS_IN_FLIGHT:
            work, _ = self._sends.popleft()
            if work is not None:
                work.wait()
        copy = x.clone(memory_format=torch.contiguous_format)
        # The copy is kept until its send is over.
        self._sends.append((dist.isend(copy, self._peer), copy))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `PipelineLink.receive`."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        work = dist.irecv(buffer, self._peer)
        if work is not None:
            with peer_waits:
                work.wait()
        return buffer

    def close(self) -> None:
        """Forget the tensors that have not arrived."""
        self._sends.clear()
