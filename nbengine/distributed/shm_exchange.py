"""A rank's place in memory that all ranks of a group have mapped, and its way through an exchange there."""

from __future__ import annotations

import ctypes

from nbengine.distributed.peer_waits import peer_waits
from nbengine.distributed.shared_memory import Peers, SharedMemory
from nbengine.kernels.cpu.exchange import SLOTS, ExchangeArguments
from nbengine.kernels.cpu.flags import Patience
from nbengine.kernels.cpu.jit import Function


class ShmExchange:
    """One rank's end of the exchanges of its group, for one thread at a time. While the rank waits it does
    not hold Python's lock, and gives way to signals several times a second.

    Raises of `run` and `finish`:
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
        """The arguments of the compiled functions beside `x` and `total`."""
        self.address = ctypes.addressof(self.arguments)

    def run(self, function: Function, x: int, total: int) -> None:
        """Call a compiled function for `total` elements or bytes at the address `x`, until it is done."""
        arguments = self.arguments
        arguments.x = x
        arguments.total = total
        arguments.position = arguments.stage = 0
        function.call(self.address)
        # Most exchanges are over within the patience of the first call; only longer waits are told of.
        if not arguments.done:
            self.finish(function)

    def finish(self, function: Function) -> None:
        """Call a compiled function that has waited in vain again and again, until it is done."""
        with peer_waits:
            while not self.arguments.done:
                self._peers.check(self._memory)
                function.call(self.address)

    def close(self) -> None:
        """Leave the exchange and tell the others."""
        self._memory.close()
        self._peers.close()
