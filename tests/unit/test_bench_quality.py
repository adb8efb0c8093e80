"""The measure of quality refuses what is not as good as the engine beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_quality
import run_all
from peers.quality import Divergence


def found(mean: float, same_top: float = 1.0, positions: int = 10) -> Divergence:
    return Divergence(mean, mean, mean, same_top, positions)


@pytest.mark.parametrize(
    ("ours", "peer", "kept"),
    [
        (found(0.001), found(0.002), "yes"),
        (found(0.002), found(0.001), "no"),
        (found(0.001, same_top=0.98), found(0.002), "no"),
        (found(0.001), None, "yes"),
    ],
)
def test_a_row_says_whether_the_limits_are_kept(ours: Divergence, peer: Divergence | None, kept: str) -> None:
    engines = {"nbengine": ours} | ({"llama_cpp": peer} if peer else {})
    cells = bench_quality.row("m", engines, 0.99)
    assert cells["kept"] == kept
    assert ("KL ratio" in cells) == (peer is not None)


def test_parts_count_by_their_positions() -> None:
    whole = bench_quality.together([found(1.0, 1.0, 30), found(5.0, 0.5, 10)])
    assert (whole.mean, whole.same_top, whole.largest, whole.positions) == (2.0, 0.875, 5.0, 40)


def test_prompts_are_places_of_the_text_and_always_the_same() -> None:
    text = list(range(1000))
    prompts = bench_quality.choose_prompts(text, 5000, 7, 20)
    assert prompts == bench_quality.choose_prompts(text, 5000, 7, 20)
    assert all(ids == text[ids[0] : ids[0] + 20] for ids in prompts)
    assert len({ids[0] for ids in prompts}) > 1
    assert all(max(ids) < 50 for ids in bench_quality.choose_prompts(None, 50, 7, 20))


def test_benchmarks_that_need_other_engines_run_only_when_named() -> None:
    assert set(run_all.names()) >= run_all.BESIDE_PEERS
