"""The link that carries tensors from a pipeline stage to the next on one machine, through memory that both
have mapped."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from nbengine.distributed.peer_waits import peer_waits
from nbengine.distributed.shared_memory import MemoryHandle, Peers, SharedMemory, create_memory
from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu.flags import FLAG_BYTES, FlagArguments, Patience, compile_flags

SLOTS = 2
_ALIGNMENT = 4096


class ShmLink:
    """Either end of a `PipelineLink`: the sender only sends, the receiver only receives. It is for one thread
    at a time.

    Tensor number n, from 1 on, goes through slot n % SLOTS. The sender raises its flag to n when it has
    written the slot; the receiver raises its own to n when it needs that tensor no more. The sender writes
    tensor n once the receiver's flag is n - SLOTS or more; so it goes on at once unless the receiver is SLOTS
    behind. A process that has seen a flag sees what was written before the flag was raised, and may overwrite
    what was read before (`nbengine.kernels.cpu.flags`).

    Raises of all calls:
        PeerDiedError: the process at the other end is needed, and has ended.
        QueueClosedError: the process at the other end is needed, and has closed its end.
    """

    def __init__(self, memory: SharedMemory, patience: Patience, peers: Peers) -> None:
        self._memory = memory
        self._peers = peers
        self._slots = memory.data.view(SLOTS, -1)
        self._functions = compile_flags()
        self._arguments = FlagArguments(patience=patience)
        self._address = ctypes.addressof(self._arguments)
        self._sent_flag, self._released_flag = memory.flags, memory.flags + FLAG_BYTES
        self._count = 0

    @staticmethod
    def reserve(directory: str, max_tensor_bytes: int) -> MemoryHandle:
        """Make the memory of a link.

        Raises:
            EngineStartError: there is no room for the memory.
        """
        slot_bytes = -(-max_tensor_bytes // _ALIGNMENT) * _ALIGNMENT
        return create_memory(directory, 2, SLOTS * slot_bytes)

    def send(self, x: Tensor) -> None:
        """See `PipelineLink.send`.

        Raises:
            InvalidArgumentError: `x` is larger than the memory was made for.
        """
        number = self._count + 1
        self._wait_for(self._released_flag, number - SLOTS)
        self._slot(number, x.shape, x.dtype).copy_(x)
        self._announce(self._sent_flag, number)
        self._count = number

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `PipelineLink.receive`; the tensor lies in the shared memory.

        Raises:
            InvalidArgumentError: the tensor is larger than the memory was made for.
        """
        # The tensor before lies in the shared memory, so it is given back only now.
        self._announce(self._released_flag, self._count)
        number = self._count + 1
        slot = self._slot(number, shape, dtype)
        self._wait_for(self._sent_flag, number)
        self._count = number
        return slot

    def close(self) -> None:
        """See `PipelineLink.close`."""
        self._memory.close()
        self._peers.close()

    def _slot(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        slot = self._slots[number % SLOTS]
        nbytes = prod(shape) * dtype.itemsize
        if nbytes > len(slot):
            raise InvalidArgumentError("x.nbytes", nbytes, f"at most {len(slot)}")
        return slot[:nbytes].view(dtype).view(tuple(shape))

    def _wait_for(self, flag: int, count: int) -> None:
        arguments = self._arguments
        arguments.flag, arguments.count = flag, count
        self._functions.wait_for.call(self._address)
        if not arguments.done:
            with peer_waits:
                while not arguments.done:
                    self._peers.check(self._memory)
                    self._functions.wait_for.call(self._address)

    def _announce(self, flag: int, count: int) -> None:
        self._arguments.flag, self._arguments.count = flag, count
        self._functions.announce.call(self._address)
