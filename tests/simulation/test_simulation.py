"""Properties of the simulation itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.planted import PLANTED, Planted
from tests.simulation.substitutes import real_things_left
from tests.simulation.world import Recorder, Violation, run_seed, simulation

ROOT = Path(__file__).parents[2]
REPLAYED = 20


@pytest.fixture(autouse=True)
def everything_outside_is_simulated() -> Iterator[None]:
    with simulation():
        yield


def test_no_module_that_a_world_reaches_has_the_real_outside() -> None:
    run_seed(3)
    # Also what was imported only now.
    assert real_things_left() == []


def test_a_seed_replays_exactly_within_a_process() -> None:
    assert _trace(3) == _trace(3)


def _trace(seed: int) -> list[str]:
    recorder = Recorder()
    # Whether something goes wrong in it is no matter here, as long as it is the same thing.
    with contextlib.suppress(Violation):
        run_seed(seed, trace=recorder)
    return recorder.lines


def test_a_seed_replays_exactly_in_another_process_whatever_its_hash_seed() -> None:
    digests = {_digest(hash_seed) for hash_seed in ("1", "2")}
    assert len(digests) == 1


def _digest(hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.simulation", "0", "--seeds", str(REPLAYED), "--digest"]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("digest "))
    return line


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted) -> None:
    """Each brings back a fault that was mended, and must be found among the first seeds."""
    with planted.installed():
        for seed in range(planted.first, planted.first + planted.within):
            reason = _violation_of(seed, planted.kinds)
            if reason is not None:
                assert any(word in reason for word in planted.says), f"seed {seed}: {reason}"
                return
    pytest.fail(f"{planted.name} is not found in {planted.within} seeds")


def _violation_of(seed: int, kinds: tuple[str, ...]) -> str | None:
    try:
        run_seed(seed, kinds=kinds)
    except Violation as violation:
        return str(violation)
    return None
