"""Whatever an engine does, a script that has got all frames knows what the mirror knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.client.observe.trace_mirror import BlockMap, TraceMirror
from nbengine.metrics.stats import EngineStats, SchedulerStats, WorkerStats
from nbengine.metrics.trace import BlocksCached, RequestTrace, TraceSnapshot
from nbengine.widgets.dashboard.frames import FRAME_BYTES, RESET_BYTES
from nbengine.widgets.dashboard.step_frames import MOST_LAG
from nbengine.widgets.following.dashboard_state import DashboardState, Rates
from nbengine.widgets.waves.timeline import RankSpan, Span, WaveTimeline
from tests.support.thorough import amount
from tests.unit.widgets.dashboards import START, SmallEngine, busy_engine, state_of, vast_mirror
from tests.unit.widgets.frame_decoder import unpacked
from tests.unit.widgets.frame_reader import Reader, assert_same


def lose(engine: SmallEngine) -> None:
    """Let the mirror miss some messages and start again from a snapshot."""
    mirror = engine.mirror
    requests = [
        RequestTrace(
            view.added,
            view.state == "running",
            view.num_computed_tokens,
            view.num_output_tokens,
            view.num_cached_tokens,
            view.num_preemptions,
            list(view.block_ids),
        )
        for view in mirror.requests.values()
    ]
    cached = np.flatnonzero(mirror.blocks.cached).tolist()
    size = mirror.blocks.block_size
    mirror.apply(
        TraceSnapshot(
            mirror.engine_index,
            (mirror.seq or 0) + 3,
            engine.time,
            size,
            mirror.max_num_batched_tokens,
            mirror.max_num_seqs,
            requests,
            BlocksCached(cached, [0] * (size * len(cached))),
            mirror.stats,
        )
    )


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 25), st.integers(-1, 2)),
    st.tuples(st.just("run"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("frame")),
    st.tuples(st.just("hello")),
)


def play(engine: SmallEngine, reader: Reader, actions: Sequence[tuple]) -> None:
    for name, *values in actions:
        if name == "add":
            prompt, max_tokens, group = values
            engine.add(prompt, max_tokens, group=group)
        elif name == "run":
            engine.run(values[0])
        elif name == "abort":
            engine.abort(values[0])
        elif name == "lose":
            lose(engine)
        elif name == "frame":
            reader.take(state_of(engine))
        else:
            reader.builder.reset()
            reader.take(state_of(engine))


@settings(max_examples=amount(15, thorough=1200), deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_all_frames_of_any_history_tell_what_the_mirror_knows(actions: list[tuple]) -> None:
    engine, reader = SmallEngine(num_blocks=30), Reader()
    play(engine, reader, actions)
    reader.take_all(state_of(engine))
    assert_same(reader.decoder, engine.mirror)
    assert all(not rank.cuts for rank in reader.decoder.ranks.values())


@settings(max_examples=amount(15, thorough=600), deadline=None)
@given(st.lists(st.one_of(ACTIONS, st.tuples(st.just("lose"))), max_size=50))
def test_after_a_loss_the_reader_is_told_and_goes_on(actions: list[tuple]) -> None:
    engine, reader = SmallEngine(num_blocks=30), Reader()
    reader.take(state_of(engine))
    engine.add(20, 40)
    engine.run(3)
    reader.take_all(state_of(engine))
    lose(engine)
    play(engine, reader, actions)
    reader.take_all(state_of(engine))
    assert_same(reader.decoder, engine.mirror, kinds=False)
    if not any(name == "hello" for name, *_ in actions):
        assert reader.decoder.ranks[0].cuts


def test_several_ranks_are_told_apart_and_may_leave() -> None:
    engines = [busy_engine(rank, seed=rank) for rank in range(3)]
    reader = Reader()
    reader.take_all(state_of(*engines))
    for engine in engines:
        assert_same(reader.decoder, engine.mirror)
    engines[1].run(5)
    reader.take_all(state_of(*engines[:2]))
    assert sorted(reader.decoder.ranks) == [0, 1]
    assert_same(reader.decoder, engines[1].mirror)


def test_a_restarted_engine_core_begins_again() -> None:
    engine, reader = busy_engine(), Reader()
    reader.take_all(state_of(engine))
    again = SmallEngine(num_blocks=30)
    again.add(10, 5)
    again.run(3)
    again.mirror.incarnation, again.mirror.num_snapshots = 1, 2
    reader.take_all(state_of(again))
    rank = reader.decoder.ranks[0]
    assert len(rank.words) == 30
    assert len(rank.cuts) == 1
    assert [step.step for step in rank.steps[rank.cuts[0] :]] == [1, 2, 3]


def test_nothing_new_is_no_frame() -> None:
    engine, reader = busy_engine(), Reader()
    state = state_of(engine)
    reader.take_all(state)
    assert reader.take(state) is None
    assert reader.take(state, force=True) is not None
    assert reader.frames[-1].buffers == []
    assert reader.take(replace(state, note="lost")) is not None
    assert reader.take(replace(state, note="lost", rates=Rates(1.0))) is not None
    reader.builder.reset()
    assert reader.take(state) is not None
    assert reader.decoder.frame["reset"] is True
    assert_same(reader.decoder, engine.mirror)


def test_many_changes_come_as_a_full_map_and_few_as_pairs() -> None:
    mirror = TraceMirror(0)
    mirror.num_snapshots, mirror.blocks = 1, BlockMap(1000, 16)
    mirror.stats = SchedulerStats(0, num_blocks=1000)
    state = replace(state_of(), mirrors={0: mirror}, stats=EngineStats([mirror.stats]))
    reader = Reader()
    reader.take(state)
    sizes = []
    for changed in (1, 499, 500):
        mirror.version += 1
        mirror.blocks.ref_counts[:changed] += 1
        mirror.blocks.version[:changed] = mirror.version
        frame = reader.take(state)
        sizes.append(len(frame.buffers[0]))
    assert sizes == [8, 8 * 499, 4 * 1000]
    assert reader.decoder.full_maps == 2
    assert [unpacked(word)[0] for word in reader.decoder.ranks[0].words] == [3] + [2] * 498 + [1] + [0] * 500


def test_words_hold_any_count_and_any_number() -> None:
    mirror = vast_mirror(num_blocks=64)
    blocks = mirror.blocks
    blocks.ref_counts[:3] = (4094, 4095, 100_000)
    blocks.holder[:4] = (2**19 - 2, 2**19 - 1, 2**19 + 5, -1)
    blocks.cached[:2] = (True, False)
    mirror.num_snapshots = 1
    reader = Reader()
    reader.take(replace(state_of(), mirrors={0: mirror}, stats=EngineStats([mirror.stats])))
    words = [unpacked(word) for word in reader.decoder.ranks[0].words]
    assert [word[0] for word in words[:3]] == [4094, 4095, 4095]
    assert [word[1] for word in words[:2]] == [True, False]
    assert [word[2] for word in words[:4]] == [2**19 - 2, 0, 6, 2**19 - 1]


def test_a_frame_carries_no_more_than_its_budget_and_the_rest_follows_in_order() -> None:
    mirror = vast_mirror(num_blocks=1000)
    mirror.num_snapshots = 1
    state = replace(state_of(), mirrors={0: mirror}, stats=EngineStats([mirror.stats]))
    reader = Reader()
    reader.take_all(state)
    assert len(reader.frames) > 3
    lengths = [len(json.dumps(frame.content)) + sum(map(len, frame.buffers)) for frame in reader.frames]
    assert lengths[0] < 1.2 * RESET_BYTES
    assert max(lengths[1:]) < 1.2 * (FRAME_BYTES + 256 * 500)
    for frame, length in zip(reader.frames, lengths, strict=True):
        assert 0.6 * length < frame.size < 1.6 * length
    assert [step.step for step in reader.decoder.ranks[0].steps] == list(range(400))
    assert not reader.decoder.ranks[0].cuts


def test_a_reader_that_falls_far_behind_is_brought_level_and_told() -> None:
    engine, reader = SmallEngine(), Reader()
    reader.take_all(state_of(engine))
    engine.add(4, 10_000)
    for _ in range(3000):
        engine.step()
    assert engine.mirror.steps[-1].time - engine.mirror.steps[0].time > MOST_LAG
    reader.take_all(state_of(engine))
    rank = reader.decoder.ranks[0]
    assert rank.cuts == [0]
    assert rank.steps[-1].step == engine.mirror.steps[-1].step
    assert MOST_LAG / 3 < rank.steps[-1].time - rank.steps[0].time <= MOST_LAG / 2


def test_what_is_learnt_of_a_step_later_follows_it() -> None:
    engine, reader = SmallEngine(), Reader()
    engine.add(5, 3)
    engine.run(1)
    step = engine.mirror.steps[-1]
    seconds, step.seconds = step.seconds, None
    reader.take(state_of(engine))
    assert reader.decoder.ranks[0].steps[-1].seconds is None
    step.seconds = seconds
    reader.take(state_of(engine))
    assert reader.decoder.ranks[0].steps[-1].seconds == pytest.approx(seconds, abs=1e-6)
    engine.abort(0)
    engine.add(5, 3)
    engine.run(1)
    reader.take_all(state_of(engine))
    assert_same(reader.decoder, engine.mirror)
    assert reader.decoder.ranks[0].steps[0].finished == [0]


def wave_state(count: int, last: float = 0.1) -> DashboardState:
    # The counts of a report may be of one step more than its steps.
    reading = RankSpan(2.0, 0.0, 0, True, 1, prefill_steps=2.0, recompute_steps=1.0)
    ranks = {0: reading, 1: RankSpan(0.0, 3.0, 0, True, 0)}
    spans = [Span(0.1 * index, 0.1 * index + 0.1, ranks) for index in range(count)]
    spans[-1] = replace(spans[-1], end=0.1 * (count - 1) + last)
    return state_of(busy_engine(), waves=WaveTimeline("demo", True, tuple(spans), START))


def test_wave_spans_come_once_when_they_are_settled() -> None:
    reader = Reader()
    state = wave_state(5)
    reader.take_all(state)
    assert reader.decoder.spans == []
    # What may still change is told all the same, so that no second is missing at the end.
    unsettled = reader.decoder.frame["waves"]["open"]
    assert [span["rank"] for span in unsettled] == [0, 1] * 5
    assert unsettled[-1]["end"] == pytest.approx(START + 0.5, abs=1e-3)
    reader.clock.now += 1.1
    reader.take_all(state)
    assert len(reader.decoder.spans) == 10
    assert reader.decoder.frame["waves"]["open"] == []
    assert reader.decoder.spans[0] == {
        "start": START,
        "end": pytest.approx(START + 0.1, abs=1e-3),
        "rank": 0,
        "running": True,
        "steps": 2.0,
        "prefill_steps": 1.0,
        "recompute_steps": 1.0,
        "dummy_steps": 0.0,
        "wave": 0,
        "num_requests": 1,
    }
    reader.take_all(wave_state(8))
    assert len(reader.decoder.spans) == 10
    reader.take_all(replace(wave_state(8), state="ended"))
    starts = [span["start"] for span in reader.decoder.spans if span["rank"] == 1]
    assert len(starts) == len(set(starts)) == 8
    reader.builder.reset()
    reader.take(wave_state(8))
    assert len(reader.decoder.spans) == 10


def test_a_dead_rank_is_not_alive_and_unknown_figures_are_null() -> None:
    engine = busy_engine()
    worker = WorkerStats(0, 5, 6, 0.25)
    stats = EngineStats([replace_stats(engine.mirror.stats, workers=[worker]), SchedulerStats(1)])
    reader = Reader()
    reader.take(replace(state_of(engine), stats=stats, rates=Rates()))
    first, second = reader.decoder.frame["ranks"]
    assert (first["alive"], second["alive"]) == (True, False)
    assert first["workers"] == [{"rank": 0, "memory_bytes": 5, "num_steps": 6, "step_seconds": 0.25}]
    assert second["block_size"] is second["max_num_seqs"] is second["blocks"] is None
    assert set(reader.decoder.frame["rates"].values()) == {None}


def replace_stats(stats: SchedulerStats, **changes: object) -> SchedulerStats:
    return SchedulerStats(**{**{name: getattr(stats, name) for name in stats.__struct_fields__}, **changes})


def test_a_rank_that_comes_again_is_told_of_from_the_beginning() -> None:
    engines = [busy_engine(rank, seed=rank) for rank in range(2)]
    reader = Reader()
    for present in (engines, engines[:1], engines):
        reader.take_all(state_of(*present))
    assert_same(reader.decoder, engines[1].mirror)


def test_a_snapshot_has_the_latest_steps() -> None:
    engine = SmallEngine(num_blocks=3000)
    engine.add(4, 10_000)
    for _ in range(3000):
        engine.step()
    reader = Reader()
    frame = reader.builder.snapshot(state_of(engine))
    reader.decoder.take(frame.content, frame.buffers)
    steps = reader.decoder.ranks[0].steps
    assert steps[-1].step == 3000
    assert 100 < len(steps) < 3000
    assert [step.step for step in steps] == list(range(3001 - len(steps), 3001))
    assert steps[0].entries == [(0, 1, 0, -1)]
    assert not reader.decoder.ranks[0].cuts
    assert len(json.dumps(frame.content)) < 100_000
    small = busy_engine()
    reader = Reader()
    frame = reader.builder.snapshot(state_of(small))
    reader.decoder.take(frame.content, frame.buffers)
    assert_same(reader.decoder, small.mirror)
