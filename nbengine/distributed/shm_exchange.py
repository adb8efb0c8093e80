"""A rank's place in memory that all ranks of a group have mapped, and how it goes through an exchange there."""

from __future__ import annotations

import ctypes

from nbengine.distributed.shared_memory import Peers, SharedMemory
from nbengine.kernels.cpu_flags import Patience
from nbengine.kernels.cpu_jit import Function
from nbengine.kernels.exchange_cpu import SLOTS, ExchangeArguments


class ShmExchange:
    """While a rank waits it holds no lock of Python's, and gives way to signals several times a second. Of one thread at a
    time.

    Raises of `run`:
        PeerDiedError: a rank that is waited for has ended.
        QueueClosedError: a rank that is waited for has closed its end.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, patience: Patience, peers: Peers) -> None:
        self._memory = memory
        self._peers = peers
        self.arguments = ExchangeArguments(
            patience=patience,
            flags=memory.flags,
            slots=memory.data.data_ptr(),
            slot_bytes=memory.handle.data_bytes // (size * SLOTS),
            rank=rank,
            phase=1,
        )
        """What the compiled functions are told beside `x` and `total`."""
        self._address = ctypes.addressof(self.arguments)

    def run(self, function: Function, x: int, total: int) -> None:
        """Call a compiled function for `total` elements or bytes at the address `x`, until it is done."""
        arguments = self.arguments
        arguments.x = x
        arguments.total = total
        arguments.position = arguments.stage = 0
        function.call(self._address)
        while not arguments.done:
            self._peers.check(self._memory)
            function.call(self._address)

    def close(self) -> None:
        """Leave, and tell the others."""
        self._memory.close()
        self._peers.close()
