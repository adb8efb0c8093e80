"""Engine cores in lock step change their number between two turns: streams that run across it go on as if nothing were.

Without a host, so that it is known between which turns. `test_elastic_engine.py` has a whole engine.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from process_support import core_process
from process_support.data_parallel_engines import QWEN2
from process_support.parallel_engines import OPTIONS
from process_support.tiny_models import VOCAB_SIZE, check_greedy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.timeout(180)

LENGTH = 60


class Cores:
    """Engine cores that are processes, and what they have said."""

    def __init__(self, directory: Path, model: Path, tp: int, expert_parallel: bool) -> None:
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.prompts: dict[str, list[int]] = {}
        self._directory = directory
        self._arguments = {
            **OPTIONS,
            "model": str(model),
            "tensor_parallel_size": tp,
            "enable_expert_parallel": expert_parallel,
        }
        self._chooser = random.Random(4)
        self._processes: list[subprocess.Popen[str]] = []
        self._groups = 0

    def start(self, before: int, after: int) -> list[list[int]]:
        """Start the engine cores from `before` on, which join those later; gives the bytes of the workers' weights."""
        new = range(before, after)
        for rank in new:
            with (self._directory / f"core-{rank}.log").open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-u", core_process.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self._processes.append(process)
        commands = {rank: {"parallel": self._parallel(rank, before, after)} for rank in new}
        common = {"do": "start", "arguments": self._arguments, "directory": str(self._directory)}
        return [answer["weights_bytes"] for answer in self._tell(commands, common)]

    def take(self, turns: int, new_prompts: dict[int, int] | None = None) -> None:
        """Let all take `turns` turns; `new_prompts` says how many requests each rank gets before."""
        commands: dict[int, dict[str, Any]] = {}
        for rank in range(len(self._processes)):
            names = [f"{len(self.prompts) + n}@{rank}" for n in range((new_prompts or {}).get(rank, 0))]
            prompts = {name: self._prompt() for name in names}
            self.prompts |= prompts
            commands[rank] = {"prompts": prompts}
        common = {"do": "take", "turns": turns, "max_tokens": LENGTH}
        for answer in self._tell(commands, common):
            for name, tokens in answer["tokens"].items():
                self.tokens[name] += tokens

    def change(self, before: int, after: int) -> list[list[int]]:
        """Change the number of cores, with all that are or will be there; return the weights' bytes of those
        that stay."""
        self._groups += 1
        common = {"do": "change", "before": before, "after": after, "init_method": self._place()}
        answers = self._tell({rank: {} for rank in range(max(before, after))}, common)
        for process in self._processes[after:]:
            self._end(process)
        del self._processes[after:]
        return [answer["weights_bytes"] for answer in answers[:after]]

    def close(self) -> None:
        for process in self._processes:
            self._end(process)

    def _tell(self, commands: dict[int, dict[str, Any]], common: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell several at once, since they wait for each other."""

        def tell(rank: int) -> dict[str, Any]:
            process = self._processes[rank]
            process.stdin.write(json.dumps(common | commands[rank]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            return json.loads(line) if line else {"error": f"engine core {rank} has ended"}

        with ThreadPoolExecutor(len(commands)) as pool:
            answers = list(pool.map(tell, commands))
        assert not [answer["error"] for answer in answers if "error" in answer]
        return answers

    def _parallel(self, rank: int, before: int, after: int) -> dict[str, Any]:
        return {
            "data_parallel_size": after,
            "data_parallel_rank": rank,
            "data_parallel_joins_later": before > 0,
            "data_parallel_init_method": self._place(),
        }

    def _place(self) -> str:
        return f"file://{self._directory}/group-{self._groups}"

    def _prompt(self) -> list[int]:
        return [self._chooser.randrange(VOCAB_SIZE - 2) for _ in range(self._chooser.randint(3, 40))]

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.communicate(json.dumps({"do": "close"}) + "\n", timeout=60)


@pytest.fixture
def cores_of(private_socket_dir: Path) -> Iterator[Any]:
    made: list[Cores] = []
    # A host removes it.
    directory = private_socket_dir / "engine"
    directory.mkdir(mode=0o700)

    def make(model: Path, tp: int, expert_parallel: bool) -> Cores:
        made.append(Cores(directory, model, tp, expert_parallel))
        return made[-1]

    yield make
    for cores in made:
        cores.close()
    shutil.rmtree(directory)


@dataclass(frozen=True)
class Case:
    """A checkpoint with its oracle, and how many engine cores there are at first, then, and in the end."""

    model: Path
    oracle: PreTrainedModel
    tp: int
    expert_parallel: bool
    sizes: tuple[int, int, int]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Start engine cores of two workers each, so that experts move between workers of all places."""
    directory = tmp_path_factory.mktemp("model")
    return Case(directory, QWEN2.write(directory), 2, False, (1, 2, 1))


def test_streams_go_on_across_changes(cores_of: Any, case: Case) -> None:
    cores = cores_of(case.model, case.tp, case.expert_parallel)
    first, most, last = case.sizes
    at_first = cores.start(0, first)
    cores.take(12, dict.fromkeys(range(first), 3))
    cores.start(first, most)
    with_most = cores.change(first, most)
    assert sum(map(sum, with_most[:first])) < sum(map(sum, at_first)), "the new ones have taken over experts"
    # Requests of ranks that are to leave end before they do; those of the others run across both changes.
    cores.take(LENGTH + 40, dict.fromkeys(range(first, most), 2))
    cores.take(20, dict.fromkeys(range(last), 2))
    with_last = cores.change(most, last)
    assert sum(map(sum, with_last)) > sum(map(sum, with_most[:last]))
    cores.take(LENGTH + 20, {0: 3})
    assert set(cores.tokens) == set(cores.prompts)
    for name, prompt in cores.prompts.items():
        assert len(cores.tokens[name]) == LENGTH
        check_greedy(case.oracle, prompt, cores.tokens[name])
