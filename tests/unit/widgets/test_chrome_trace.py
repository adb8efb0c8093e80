"""The trace keeps the format's rules, and says what the steps say."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.widgets.dashboard.chrome_trace import chrome_trace, history_of
from tests.support.thorough import amount
from tests.unit.widgets.dashboards import SmallEngine, busy_engine, state_of

HOSTILE = '</script>"\\\x00\u202e'


def events_of(*engines: SmallEngine) -> list[dict[str, Any]]:
    document = json.loads(chrome_trace(history_of(state_of(*engines))))
    assert document["displayTimeUnit"] == "ms"
    return document["traceEvents"]


def check_rules(events: list[dict[str, Any]]) -> None:
    """Check what the Trace Event Format asks of each kind of event, and that no two spans of a track
    overlap."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in ("X", "C", "i", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            span = (event["ts"], event["ts"] + event["dur"])
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
        elif event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] == "t"
        else:
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
    for spans in tracks.values():
        spans.sort()
        for (_, ended), (began, _) in itertools.pairwise(spans):
            assert began >= ended - 0.01


def let_overlap(engine: SmallEngine, depth: int) -> None:
    """Let the outcome of each step come when `depth` steps, it included, are in flight."""
    steps = list(engine.mirror.steps)
    for at, step in enumerate(steps[:-1]):
        if depth > 1:
            step.seconds = steps[min(at + depth, len(steps)) - 1].time - step.time + 0.003


@settings(max_examples=amount(15, thorough=500), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 25), st.integers(-1, 1)), max_size=12),
    st.integers(1, 4),
    st.data(),
)
def test_any_history_keeps_the_rules_and_loses_no_token(
    requests: list[tuple[int, int, int]], depth: int, data: st.DataObject
) -> None:
    engine = SmallEngine(num_blocks=30)
    for prompt, max_tokens, group in requests:
        engine.add(prompt, max_tokens, group=group)
        engine.run(data.draw(st.integers(0, 9)))
        if data.draw(st.booleans()):
            engine.abort(data.draw(st.integers(0, 11)))
    let_overlap(engine, depth)
    events = events_of(engine)
    check_rules(events)
    steps = list(engine.mirror.steps)
    assert [event["args"]["step"] for event in events if event["name"] == "step"] == [s.step for s in steps]
    spans = [
        event
        for event in events
        if event["ph"] == "X" and event["name"] in ("prefill", "decode", "recompute")
    ]
    computed = sum(sum(step.num_tokens) for step in steps)
    assert sum(event["args"].get("tokens", 0) for event in spans) == computed


def test_what_happens_to_a_request_stands_on_its_track() -> None:
    engine = busy_engine()
    events = events_of(engine)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 0] == "steps"
    view = next(v for v in engine.mirror.finished.values() if v.num_preemptions and v.num_cached_tokens)
    track = view.added.number + 1
    assert names[0, track] == view.added.request_id
    own = [event for event in events if event["tid"] == track and event["ph"] != "M"]
    kinds = [event["name"] for event in sorted(own, key=lambda event: event["ts"])]
    assert {"waiting", "prefill", "decode", "preempted", "prefix hit", "finished"} <= set(kinds)
    assert kinds.count("preempted") == view.num_preemptions
    assert kinds[-1] == "finished"
    (finished,) = [event for event in own if event["name"] == "finished"]
    assert finished["args"] == {"reason": "length"}


def test_counters_are_those_of_each_step_and_ranks_are_processes() -> None:
    engines = [busy_engine(rank, seed=rank) for rank in range(2)]
    events = events_of(*engines)
    check_rules(events)
    for rank, engine in enumerate(engines):
        counted = [e["args"] for e in events if e["pid"] == rank and e["name"] == "requests"]
        steps = engine.mirror.steps
        assert counted == [{"running": s.num_running, "waiting": s.num_waiting} for s in steps]
        free = [e["args"]["free"] for e in events if e["pid"] == rank and e["name"] == "free blocks"]
        assert free == [s.num_free_blocks for s in steps]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "engine core 0",
        "engine core 1",
    }


def test_any_name_is_a_text() -> None:
    engine = SmallEngine()
    engine.add(5, 2, name=HOSTILE)
    engine.run(2)
    assert HOSTILE in [event["args"].get("name") for event in events_of(engine)]


def test_a_step_without_an_outcome_has_no_length() -> None:
    engine = SmallEngine()
    engine.add(5, 9)
    engine.run(2)
    engine.mirror.steps[-1].seconds = None
    spans = [event for event in events_of(engine) if event["name"] == "step"]
    assert spans[0]["dur"] == pytest.approx(engine.mirror.steps[0].seconds * 1e6, abs=0.2)
    assert spans[1]["dur"] == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_together_have_tracks_of_their_own(depth: int) -> None:
    engine = busy_engine()
    assert engine.mirror.stats.num_preemptions > 0
    let_overlap(engine, depth)
    events = events_of(engine)
    check_rules(events)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks = [event["tid"] for event in events if event["name"] == "step"]
    assert tracks == [at % depth for at in range(len(engine.mirror.steps))]
    assert [names[track] for track in range(depth)] == ["steps", "steps 2", "steps 3"][:depth]
    assert {event["tid"] for event in events if event["name"] == "decode"}.isdisjoint(range(depth))


def test_a_preemption_ends_what_was_in_flight_for_the_request() -> None:
    engine = SmallEngine(num_blocks=12)
    for _ in range(3):
        engine.add(12, 14)
    engine.run(60)
    steps = list(engine.mirror.steps)
    let_overlap(engine, 2)
    events = events_of(engine)
    check_rules(events)
    begun = sorted(event["ts"] for event in events if event["name"] == "preempted")
    lost_at = [round((step.time - steps[0].time) * 1e6, 1) for step in steps for _ in step.preempted]
    assert begun == lost_at
    assert len(begun) > 1


def test_what_happens_after_a_copy_is_not_in_its_trace() -> None:
    engine = SmallEngine()
    engine.add(5, 6, name="first")
    engine.run(3)
    step, seconds = engine.mirror.steps[-1], engine.mirror.steps[-1].seconds
    step.seconds = None
    history = history_of(state_of(engine))
    before = chrome_trace(history)
    step.seconds = seconds
    engine.abort(0)
    engine.add(9, 4)
    engine.run(4)
    assert chrome_trace(history) == before
    assert history.ranks[0].requests[0].finish_reason is None
    assert chrome_trace(history_of(state_of(engine))) != before
