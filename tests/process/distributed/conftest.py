"""Processes that are ranks."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from ports import reserved_port
from process_support.rank_mould import Mould
from stopping import stop

ANSWER_SECONDS = 60.0
MOST_RANKS = 4


class RankProcess:
    """A process of `process_support.rank_process`."""

    def __init__(self, mould: Mould, log: Path) -> None:
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        try:
            self._process = mould.copy(stdin, stdout, log)
        finally:
            os.close(stdin)
            os.close(stdout)
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.runs

    def tell(self, command: dict[str, Any]) -> None:
        os.write(self._stdin, f"{json.dumps(command)}\n".encode())

    def answer(self, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        line = self._answers.get(timeout=timeout)
        return json.loads(line) if line else {"error": "ended"}

    def stop(self) -> None:
        stop(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._reader.join()
        self._process.close()
        os.close(self._stdin)

    def _read(self) -> None:
        with open(self._stdout) as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put("")


class World:
    """The ranks of one engine, by rank."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.ranks = ranks

    def each(self) -> list[dict[str, Any]]:
        """Return the next answer of each rank."""
        return [rank.answer() for rank in self.ranks]

    def leave(self) -> None:
        """Let all go on to the end."""
        for rank in self.ranks:
            rank.tell({})
        assert self.each() == [{"left": True}] * len(self.ranks)

    def listening_addresses(self) -> set[str]:
        """List the addresses on which ranks listen."""
        connections = [c for rank in self.ranks for c in psutil.Process(rank.pid).net_connections("inet")]
        return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


class RankPool:
    """Processes that live through many tests; those that have died are replaced before the next one."""

    def __init__(self, mould: Mould, directory: Path) -> None:
        self._mould = mould
        self._directory = directory
        self._ranks: list[RankProcess] = []
        self._started = 0

    def refill(self) -> None:
        for rank in [rank for rank in self._ranks if not rank.runs]:
            rank.close()
            self._ranks.remove(rank)
        while len(self._ranks) < MOST_RANKS:
            self._started += 1
            self._ranks.append(RankProcess(self._mould, self._directory / f"rank-{self._started}.log"))

    def take(self, count: int) -> list[RankProcess]:
        return self._ranks[:count]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


@pytest.fixture(scope="module")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """The processes of a module's tests."""
    with Mould() as mould:
        pool = RankPool(mould, tmp_path_factory.mktemp("ranks"))
        yield pool
        pool.close()


@pytest.fixture
def living_ranks(rank_pool: RankPool) -> RankPool:
    """The processes, all of them running."""
    rank_pool.refill()
    return rank_pool


@pytest.fixture
def port() -> Iterator[int]:
    """A port on the loopback that nobody else gets."""
    with reserved_port() as port:
        yield port


@pytest.fixture(autouse=True)
def no_leftovers(living_ranks: RankPool, no_leftovers: None) -> None:
    """Check for leftovers as everywhere; but the processes are there before and after."""


StartWorld = Callable[..., World]


@pytest.fixture
def start_world(living_ranks: RankPool, tmp_path: Path) -> StartWorld:
    """Tell processes to join a world of `tp` x `pp` ranks in each of `dp` engine cores; of `only`, if given."""

    def start(
        tp: int, pp: int = 1, *, dp: int = 1, only: Sequence[int] | None = None, **command: Any
    ) -> World:
        defaults = {
            "over": "memory",
            "networked": command.get("over") == "gloo",
            "init_method": f"file://{tmp_path}/rendezvous",
            "cores_meet_at": f"file://{tmp_path}/cores",
            "directory": str(tmp_path),
            "seed": 1,
            "num_calls": 60,
            "timeout": 30.0,
        }
        numbers = range(dp * tp * pp) if only is None else only
        ranks = living_ranks.take(len(numbers))
        for number, rank in zip(numbers, ranks, strict=True):
            layout = [number % tp, tp, number // tp % pp, pp, number // (tp * pp), dp]
            rank.tell({**defaults, **command, "layout": layout})
        return World(ranks)

    return start
