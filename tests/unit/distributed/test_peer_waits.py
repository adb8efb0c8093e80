"""A rank is seen to wait while it waits for others, and not when nobody keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbengine.distributed.peer_waits import peer_waits
from nbengine.distributed.shared_memory import Peers, SharedMemory, create_memory, patience, unlink
from nbengine.distributed.shm_exchange import ShmExchange


class Exchange:
    """Compiled code that comes back without having finished, as it does while others keep it waiting."""

    def __init__(self, exchange: ShmExchange, rounds: int) -> None:
        self.exchange, self.rounds = exchange, rounds

    def call(self, address: int) -> None:
        del address
        self.rounds -= 1
        self.exchange.arguments.done = self.rounds == 0


@pytest.mark.parametrize(("rounds", "told"), [(1, []), (3, [True, False])])
def test_a_wait_is_told_of_only_when_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, told: list[bool]
) -> None:
    heard: list[bool] = []
    monkeypatch.setattr(peer_waits, "tell", heard.append)
    handle = create_memory(str(tmp_path), 2, 1 << 16)
    memory = SharedMemory(handle)
    unlink(handle)
    exchange = ShmExchange(memory, 0, 2, patience(memory, short=False), Peers({}))
    exchange.run(Exchange(exchange, rounds), 0, 1)
    assert heard == told
