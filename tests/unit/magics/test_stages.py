"""The stages of a start, which several workers report at once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.config import ParallelConfig
from nbengine.ipc.control_messages import Progress
from nbengine.widgets.processes.stages import StartStages

FOUR = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
LABELS = ["TP0 PP0", "TP1 PP0", "TP0 PP1", "TP1 PP1"]


def load(
    worker: int | None, fraction: float | None, seconds: float = 0.0, stage: str = "load", rank: int = 0
) -> Progress:
    return Progress(stage, "the weights", fraction, seconds, rank, worker)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock, so that seconds are those that are reported."""
    monkeypatch.setattr("nbengine.widgets.processes.stages.time.monotonic", lambda: 0.0)


@pytest.mark.usefixtures("frozen")
def test_each_worker_has_a_line_under_the_stage() -> None:
    stages = StartStages(FOUR)
    stages.take(Progress("load", "starting the engine's processes"))
    for report in (load(2, 0.5, 1.5), load(0, 1.0, 2.0), load(1, None, 0.25)):
        stages.take(report)
    assert stages.lines() == [
        "  ▸ load        0.0 s   38%  1 of 4 workers",
        "    ✓ TP0 PP0   2.0 s",
        "    ▸ TP1 PP0   0.2 s  the weights",
        "    ▸ TP0 PP1   1.5 s   50%  the weights",
    ]


@pytest.mark.usefixtures("frozen")
def test_a_line_is_given_for_each_worker_that_is_done_and_then_for_the_stage() -> None:
    stages = StartStages(ParallelConfig(tensor_parallel_size=2))
    assert stages.take(Progress("fetch", "here", 1.0, 0.5)) == []
    assert stages.take(Progress("load", "starting")) == ["  ✓ fetch       0.5 s  here"]
    assert stages.take(load(1, 0.9, 1.0)) == []
    assert stages.take(load(1, 1.0, 2.0)) == ["  ✓ load        2.0 s  TP1"]
    assert stages.take(load(1, 1.0, 2.5)) == []
    assert stages.take(load(0, 0.5, 3.0)) == []
    assert stages.take(Progress("profile")) == [
        "  ✓ load        3.0 s  TP0",
        "  ✓ load        0.0 s  2 of 2 workers",
    ]
    assert stages.end("failed") == ["  ✗ profile     0.0 s"]
    assert stages.end("failed") == []


@pytest.mark.usefixtures("frozen")
def test_a_failed_start_shows_which_workers_were_not_done() -> None:
    stages = StartStages(ParallelConfig(pipeline_parallel_size=2))
    stages.take(load(0, 1.0, 1.0))
    stages.take(load(1, 0.5, 2.0))
    assert stages.end("failed") == ["  ✗ load        2.0 s  PP1", "  ✗ load        1.0 s  1 of 2 workers"]
    assert stages.lines()[1:] == ["    ✓ PP0       1.0 s", "    ✗ PP1       2.0 s  the weights"]


@pytest.mark.usefixtures("frozen")
def test_a_worker_that_goes_ahead_does_not_end_the_stage_of_the_others() -> None:
    stages = StartStages(ParallelConfig(tensor_parallel_size=2))
    stages.take(load(0, 0.5, stage="join"))
    stages.take(load(1, 0.5, stage="join"))
    assert stages.take(load(0, 0.1, 1.0)) == ["  ✓ join        0.0 s  TP0"]
    assert stages.take(load(1, 0.7, stage="join")) == []
    assert stages.take(load(1, 0.1)) == [
        "  ✓ join        0.0 s  TP1",
        "  ✓ join        0.0 s  2 of 2 workers",
    ]
    assert [line.split()[1] for line in stages.lines() if line.startswith("  ▸")] == ["load"]


@pytest.mark.usefixtures("frozen")
def test_a_workers_last_word_on_a_stage_that_is_over_opens_none_again() -> None:
    stages = StartStages(ParallelConfig(tensor_parallel_size=2))
    for worker in range(2):
        stages.take(load(worker, 1.0, stage="join"))
    stages.take(load(0, 0.5))
    stages.take(Progress("profile"))
    before = stages.lines()
    for stage in ("join", "load"):
        assert stages.take(load(0, 1.0, stage=stage)) == []
    assert stages.lines() == before
    assert before[-1].startswith("  ▸ profile")


TWO_CORES = ParallelConfig(data_parallel_size=2)


@pytest.mark.usefixtures("frozen")
def test_each_engine_core_has_a_line_and_a_stage_is_over_when_all_have_left_it() -> None:
    stages = StartStages(TWO_CORES)
    stages.take(Progress("fetch", "here", 1.0, 0.5))
    assert stages.take(Progress("load", "starting the engine's processes")) == ["  ✓ fetch       0.5 s  here"]
    assert stages.take(load(None, 0.5, 1.0, rank=1)) == []
    assert stages.take(load(None, 1.0, 2.0, rank=0)) == ["  ✓ load        2.0 s  DP0"]
    assert stages.take(Progress("profile", rank=0)) == []
    assert stages.lines() == [
        "  ✓ fetch       0.5 s  here",
        "  ▸ load        0.0 s   75%  1 of 2 engine cores",
        "    ✓ DP0       2.0 s",
        "    ▸ DP1       1.0 s   50%  the weights",
        "  ▸ profile     0.0 s    0%  0 of 2 engine cores",
        "    ▸ DP0       0.0 s",
    ]
    assert stages.take(Progress("profile", rank=1)) == [
        "  ✓ load        1.0 s  DP1",
        "  ✓ load        0.0 s  2 of 2 engine cores",
    ]
    assert stages.take(Progress("ready")) == [
        "  ✓ profile     0.0 s  DP0",
        "  ✓ profile     0.0 s  DP1",
        "  ✓ profile     0.0 s  2 of 2 engine cores",
    ]


@pytest.mark.usefixtures("frozen")
def test_workers_of_several_cores_have_a_line_each_and_a_core_speaks_for_its_own() -> None:
    stages = StartStages(ParallelConfig(tensor_parallel_size=2, data_parallel_size=2))
    for rank in (1, 0):
        for worker in range(2):
            stages.take(load(worker, 0.5, 1.0, rank=rank))
    assert stages.lines() == [
        "  ▸ load        0.0 s   50%  0 of 4 workers",
        "    ▸ DP0 TP0   1.0 s   50%  the weights",
        "    ▸ DP0 TP1   1.0 s   50%  the weights",
        "    ▸ DP1 TP0   1.0 s   50%  the weights",
        "    ▸ DP1 TP1   1.0 s   50%  the weights",
    ]
    assert stages.take(Progress("profile", rank=1)) == [
        "  ✓ load        1.0 s  DP1 TP0",
        "  ✓ load        1.0 s  DP1 TP1",
    ]
    assert stages.lines()[0] == "  ▸ load        0.0 s   75%  2 of 4 workers"
    assert stages.take(load(1, 1.0, 1.5, rank=1)) == []
    assert stages.take(Progress("profile", rank=0))[-1] == "  ✓ load        1.0 s  4 of 4 workers"


def test_of_engine_cores_that_join_only_these_have_a_line() -> None:
    stages = StartStages(TWO_CORES, ranks=[1])
    stages.take(load(None, 0.5, rank=1))
    assert [line.split()[1] for line in stages.lines()] == ["load", "DP1"]
    assert stages.take(load(None, 1.0, rank=1))[0].endswith("DP1")
    assert stages.lines()[0].endswith("1 of 1 engine core")


@given(st.data())
def test_in_any_order_of_reports_every_part_ends_once_and_the_share_never_shrinks(
    data: st.DataObject,
) -> None:
    """Each worker reports growing shares of "join" and then of "load", the workers interleaved at will."""
    reports = {
        worker: [
            load(worker, fraction, stage=stage)
            for stage in ("join", "load")
            for fraction in sorted(data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1)))
        ]
        for worker in range(4)
    }
    stages, ended, share = StartStages(FOUR), [], {"join": 0, "load": 0}
    while any(reports.values()):
        worker = data.draw(st.sampled_from([worker for worker, left in reports.items() if left]))
        ended += stages.take(reports[worker].pop(0))
        for line in stages.lines():
            shown = re.match(r"  ▸ (\w+) .* (\d+)%  \d of 4 workers", line)
            if shown:
                assert int(shown[2]) >= share[shown[1]]
                share[shown[1]] = int(shown[2])
    ended += stages.take(Progress("profile"))
    words = [line.split() for line in ended]
    assert all(parts[0] == "✓" for parts in words)
    for stage in ("join", "load"):
        of_stage = [" ".join(parts[4:]) for parts in words if parts[1] == stage]
        assert sorted(of_stage) == sorted([*LABELS, "4 of 4 workers"])
        assert of_stage[-1] == "4 of 4 workers"


def test_one_worker_has_no_line_of_its_own() -> None:
    stages = StartStages(ParallelConfig())
    stages.take(Progress("load", "the weights", 0.5))
    assert len(stages.lines()) == 1
