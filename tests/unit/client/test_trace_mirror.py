"""A mirror keeps blocks and steps, and says what has changed.

`tests/unit/scheduler/test_trace_histories.py` tests that it is exact.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from nbengine.client.observe import trace_mirror
from nbengine.client.observe.block_map import BlockMap
from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.client.observe.trace_views import Advanced
from nbengine.errors import WireError
from nbengine.metrics.stats import SchedulerStats
from nbengine.metrics.trace import (
    BlocksCached,
    BlocksUncached,
    RequestAdded,
    RequestFinished,
    RequestTrace,
    StepContinued,
    StepDone,
    StepPlanned,
    TraceBatch,
    TraceEvent,
    TraceSnapshot,
)


def added(number: int, prompt: int = 4) -> RequestAdded:
    return RequestAdded(number, f"r{number}", 1, 10.0 + number, prompt, 100, list(range(prompt)))


def snapshot(seq: int = 0, incarnation: int = 0, requests: list[RequestTrace] | None = None) -> TraceSnapshot:
    stats = SchedulerStats(num_blocks=16)
    cached = BlocksCached([], [])
    return TraceSnapshot(0, seq, 1.0, 2, 64, 8, requests or [], cached, stats, incarnation)


def batch(seq: int, *events: TraceEvent, incarnation: int = 0) -> TraceBatch:
    return TraceBatch(0, seq, float(seq), list(events), SchedulerStats(num_blocks=16), incarnation)


def begun(*events: TraceEvent) -> TraceMirror:
    mirror = TraceMirror(0)
    assert mirror.apply(snapshot())
    assert mirror.apply(batch(1, *events))
    return mirror


def admit(step: int, number: int, blocks: list[int], count: int = 4, hit: int = 0) -> StepPlanned:
    return StepPlanned(step, 20.0 + step, [number], [count], [hit], [number], [(number, blocks)])


def test_blocks_say_who_took_them_last_and_when_they_have_changed() -> None:
    mirror = begun(added(0), added(1), admit(0, 0, [3, 5]), admit(1, 1, [3, 6]))
    blocks = mirror.blocks
    assert blocks.holder[[3, 5, 6, 7]].tolist() == [1, 0, 1, -1]
    assert blocks.position[[3, 5, 6]].tolist() == [0, 1, 1]
    assert blocks.ref_counts[[3, 5, 6, 7]].tolist() == [2, 1, 1, 0]
    assert (mirror.holders(3), mirror.holders(5), mirror.holders(7)) == ([0, 1], [0], [])
    seen = mirror.version
    assert mirror.apply(batch(2, RequestFinished(1, 30.0, "stop"), BlocksCached([5], [8, 9])))
    assert (blocks.version > seen).nonzero()[0].tolist() == [3, 5, 6]
    # Who had it last is known after its end.
    assert blocks.holder[6] == 1
    assert blocks.token_ids[5].tolist() == [8, 9]
    assert mirror.apply(batch(3, BlocksUncached([5])))
    assert blocks.token_ids[5].tolist() == [-1, -1]
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (14, 0)


def test_many_blocks_at_once_are_as_one_after_the_other() -> None:
    mirror = begun(added(0), added(1), admit(0, 0, [3, 5]), admit(1, 1, [9, 3, 8, 7, 5, 1]))
    blocks = mirror.blocks
    assert blocks.ref_counts.tolist() == [0, 1, 0, 2, 0, 2, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert blocks.position[[9, 3, 8, 7, 5, 1]].tolist() == [0, 1, 2, 3, 4, 5]
    assert mirror.steps[-1].num_free_blocks == blocks.num_free_blocks == 10


def test_steps_that_go_on_share_what_is_equal() -> None:
    first = StepPlanned(0, 20.0, [0, 1], [4, 4], [0, 0], [0, 1], [])
    rest = [StepContinued(step, 20.0 + step, []) for step in range(1, 50)]
    done = [StepDone(step, 20.5 + step) for step in range(50)]
    events = [event for pair in zip([first, *rest], done, strict=True) for event in pair]
    mirror = begun(added(0), added(1), *events)
    steps = list(mirror.steps)
    assert [list(step.num_computed) for step in steps[:3]] == [[0, 0], [4, 4], [5, 5]]
    assert list(steps[-1].num_computed) == [52, 52]
    assert len({id(step.numbers) for step in steps[1:]}) == 1
    assert len({id(step.num_tokens) for step in steps[1:]}) == 1
    assert isinstance(steps[-1].num_computed, Advanced)
    assert steps[-1].num_computed[1] == 52
    assert list(steps[-1].num_computed[:1]) == [52]
    assert [step.num_sampled for step in steps] == [2] * 50
    assert {step.seconds for step in steps} == {0.5}
    assert mirror.requests[0].num_output_tokens == 50
    assert mirror.requests[0].num_computed_tokens == 53
    assert mirror.requests[1].first_token_at == 20.5


def test_a_gap_is_noticed_and_nothing_is_taken_until_a_snapshot_comes() -> None:
    mirror = begun(added(0), added(1), admit(0, 0, [3]))
    before = mirror.version
    assert not mirror.apply(batch(3, RequestFinished(0, 30.0, "stop")))
    assert (mirror.seq, mirror.version, list(mirror.requests)) == (None, before, [0, 1])
    assert not mirror.apply(batch(4))
    running = RequestTrace(added(1), True, 4, 2, 0, 0, [7])
    assert mirror.apply(snapshot(4, requests=[running]))
    assert (mirror.seq, mirror.num_snapshots) == (4, 2)
    assert mirror.version > before
    # How it ended is not known, only that it did.
    ended = mirror.finished[0]
    assert (ended.state, ended.finish_reason, ended.ended_at, ended.block_ids) == ("finished", None, None, [])
    assert mirror.blocks.ref_counts.nonzero()[0].tolist() == [7]
    assert len(mirror.steps) == 1
    assert mirror.apply(batch(5, StepDone(9, 40.0, [1], [1])))
    assert mirror.requests[1].num_output_tokens == 3


def test_a_first_token_that_nobody_was_told_of_has_no_time() -> None:
    mirror = begun(added(0), admit(0, 0, [3]))
    assert not mirror.apply(batch(3))
    requests = [
        RequestTrace(added(0), True, 6, 2, 0, 0, [3, 4, 5]),
        RequestTrace(added(1), True, 4, 0, 0, 0, [7]),
    ]
    assert mirror.apply(snapshot(3, requests=requests))
    assert mirror.apply(batch(4, StepDone(9, 40.0, [1, 1], [0, 1])))
    assert mirror.apply(batch(5, StepDone(10, 41.0, [1, 1], [0, 1])))
    assert [view.num_output_tokens for view in mirror.requests.values()] == [4, 2]
    assert [view.first_token_at for view in mirror.requests.values()] == [None, 40.0]


def test_old_messages_change_nothing() -> None:
    mirror = begun(added(0))
    before = mirror.version
    assert mirror.apply(batch(1, added(7)))
    assert mirror.apply(snapshot(1))
    assert (mirror.version, mirror.num_snapshots, list(mirror.requests)) == (before, 1, [0])


def test_the_mirror_of_an_engine_core_that_was_started_again_is_empty() -> None:
    under_way = admit(1, 1, [4])
    mirror = begun(added(0), admit(0, 0, [3]), RequestFinished(0, 30.0, "stop"), added(1), under_way)
    assert not mirror.apply(batch(2, incarnation=1))
    assert mirror.apply(snapshot(0, incarnation=1))
    assert (mirror.incarnation, len(mirror.requests), len(mirror.finished), len(mirror.steps)) == (1, 0, 0, 0)
    assert mirror.blocks.holder.tolist() == [-1] * 16
    # Its step 1 is another one.
    done = StepDone(1, 40.0, [1, 1], [0, 5])
    assert mirror.apply(batch(1, added(0), added(5), done, incarnation=1))
    assert [view.num_output_tokens for view in mirror.requests.values()] == [1, 1]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_mirror, "HISTORY_REQUESTS", 3)
    mirror = begun()
    assert mirror.steps.maxlen == trace_mirror.HISTORY_STEPS == 10_000
    for number in range(5):
        events = added(number), RequestFinished(number, 30.0, "abort")
        assert mirror.apply(batch(number + 2, *events))
    assert list(mirror.finished) == [2, 3, 4]
    assert not mirror.requests


def test_rejected_drafts_are_computed_again() -> None:
    planned = StepPlanned(0, 20.0, [0], [4], [0], [0], [])
    drafts = StepPlanned(1, 21.0, [0], [4], [4], [], [])
    mirror = begun(added(0), planned, StepDone(0, 20.5), drafts, StepDone(1, 21.5, [2], None, [(0, 2)]))
    view = mirror.requests[0]
    assert (view.num_output_tokens, view.num_computed_tokens) == (3, 6)
    assert mirror.steps[-1].num_sampled == 2


@pytest.mark.parametrize("event", [StepContinued(3, 1.0, []), StepDone(3, 1.0)])
def test_an_event_about_a_step_that_nobody_planned_is_an_error(event: TraceEvent) -> None:
    with pytest.raises(WireError, match="step 3"):
        begun(event)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_that_come_together_end_as_those_that_come_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    together, single = BlockMap(40, 3), BlockMap(40, 3)
    for version in range(1, 60):
        block_ids = rng.sample(range(40), rng.choice((1, 2, 4, 5, 12)))
        if rng.random() < 0.5:
            # The tokens of the last ones may be unknown.
            known = rng.randrange(len(block_ids) + 1)
            token_ids = [rng.randrange(-1, 100) for _ in range(3 * known)]
            growth = together.store(block_ids, token_ids, version)
            parts = [token_ids[3 * place : 3 * place + 3] for place in range(len(block_ids))]
            told = [single.store([one], part, version) for one, part in zip(block_ids, parts, strict=True)]
        else:
            growth = together.forget(block_ids, version)
            told = [single.forget([one], version) for one in block_ids]
        assert growth == sum(told)
        for name in ("cached", "version", "token_ids"):
            assert np.array_equal(getattr(together, name), getattr(single, name))
        assert together.num_cached_blocks == int(np.count_nonzero(single.cached))


@pytest.mark.parametrize("num_blocks", [1, 3, 9])
def test_tokens_that_fit_no_block_are_refused(num_blocks: int) -> None:
    blocks = BlockMap(16, 3)
    for token_ids in ([1, 2], [0] * (3 * num_blocks + 3)):
        with pytest.raises((ValueError, IndexError)):
            blocks.store(list(range(num_blocks)), token_ids, 1)
