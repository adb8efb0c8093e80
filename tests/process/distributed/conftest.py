"""Processes that are ranks."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_support import rank_process
from process_support.stopping import stop

ANSWER_SECONDS = 60.0
MOST_RANKS = 4


class RankProcess:
    """A process of `process_support.rank_process`."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-u", rank_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def tell(self, command: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        line = self._answers.get(timeout=timeout)
        return json.loads(line) if line else {"error": "ended"}

    def stop(self) -> None:
        stop(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


class World:
    """The ranks of one engine, by rank."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.ranks = ranks

    def each(self) -> list[dict[str, Any]]:
        """The next answer of each."""
        return [rank.answer() for rank in self.ranks]

    def leave(self) -> None:
        """Let all go on to the end."""
        for rank in self.ranks:
            rank.tell({})
        assert self.each() == [{"left": True}] * len(self.ranks)

    def listening_addresses(self) -> set[str]:
        """Where the ranks can be reached from."""
        connections = [c for rank in self.ranks for c in psutil.Process(rank.pid).net_connections("inet")]
        return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


class RankPool:
    """Processes that live through many tests; those that have died are replaced before the next one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ranks: list[RankProcess] = []
        self._started = 0

    def refill(self) -> None:
        for rank in [rank for rank in self._ranks if not rank.runs]:
            rank.close()
            self._ranks.remove(rank)
        while len(self._ranks) < MOST_RANKS:
            self._started += 1
            self._ranks.append(RankProcess(self._directory / f"rank-{self._started}.log"))

    def take(self, count: int) -> list[RankProcess]:
        return self._ranks[:count]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


@pytest.fixture(scope="module")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """The processes of a module's tests."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture
def living_ranks(rank_pool: RankPool) -> RankPool:
    """The processes, all of them running."""
    rank_pool.refill()
    return rank_pool


@pytest.fixture(autouse=True)
def no_leftovers(living_ranks: RankPool, no_leftovers: None) -> None:
    """As everywhere; but the processes are there before and after."""


StartWorld = Callable[..., World]


@pytest.fixture
def start_world(living_ranks: RankPool, tmp_path: Path) -> StartWorld:
    """Tell processes to join a world of `tp` x `pp` ranks in each of `dp` engine cores; of `only`, if given."""

    def start(
        tp: int, pp: int = 1, *, dp: int = 1, only: Sequence[int] | None = None, **command: Any
    ) -> World:
        defaults = {
            "over": "memory",
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
