"""The table of requests in frames: what is sent of a request, when, and of how many."""

from __future__ import annotations

from nbengine.metrics.trace import RequestAdded
from nbengine.widgets.dashboard.frames import MOST_ENDED, MOST_REQUESTS
from tests.unit.widgets.dashboards import SmallEngine, state_of
from tests.unit.widgets.frame_reader import Reader


def test_texts_are_cut_and_own_requests_marked() -> None:
    hostile = "</script><img src=x onerror=alert(1)>\u202e" + "x" * 5000
    engine = SmallEngine()
    engine.add(5, 3, name=hostile)
    engine.add(5, 3, name="mine")
    engine.run(1)
    reader = Reader()
    reader.take(state_of(engine, own={"mine": True}))
    first, second = reader.decoder.requests
    assert first["id"] == hostile[:199] + "…"
    assert (first["own"], first["foreground"]) == (False, False)
    assert (second["own"], second["foreground"]) == (True, True)
    assert second["preview"] == "prompt 1"


def test_a_number_that_is_given_again_is_another_request() -> None:
    reader = Reader()
    engine = SmallEngine()
    engine.add(5, 3, name="first")
    engine.run(1)
    reader.take(state_of(engine))
    view = engine.mirror.requests[0]
    added = view.added
    view.added = RequestAdded(0, "second", 1, added.time, 5, 8, added.prompt_token_ids)
    reader.take(state_of(engine))
    assert reader.decoder.requests[0]["id"] == "second"


def test_what_does_not_change_of_a_request_is_sent_once() -> None:
    reader = Reader()
    engine = SmallEngine(num_blocks=3000, budget=4096, max_seqs=64)
    for _ in range(64):
        engine.add(4, 500)
    engine.run(2)
    reader.take_all(state_of(engine))
    engine.run(1)
    reader.take_all(state_of(engine))
    (rank,) = reader.frames[-1].content["ranks"]
    values = [value for number in range(64) for value in (number, 6, 3)]
    assert rank["requests"] == {"gone": [], "new": [], "status": [], "progress": values, "texts": []}
    engine.abort(7)
    engine.run(1)
    reader.take_all(state_of(engine, own={"generate-3": False, "generate-5": True}))
    (rank,) = reader.frames[-1].content["ranks"]
    assert [row[0] for row in rank["requests"]["status"]] == [3, 5, 7]
    assert [row[-2:] for row in rank["requests"]["status"]] == [[True, False], [True, True], [False, False]]
    reader.take(state_of(engine, own={"generate-3": False, "generate-5": True}), force=True)
    assert reader.frames[-1].content["ranks"][0]["requests"] is None


def test_the_table_has_its_most_and_the_latest_that_have_ended() -> None:
    reader = Reader()
    engine = SmallEngine(num_blocks=3000, budget=4096, max_seqs=300)
    for _ in range(MOST_REQUESTS + 60):
        engine.add(4, 500)
    engine.run(1)
    reader.take(state_of(engine))
    assert [row["number"] for row in reader.decoder.requests] == list(range(MOST_REQUESTS))
    for number in range(250):
        engine.time += 0.001
        engine.abort(number)
    engine.run(1)
    reader.take(state_of(engine))
    rows = [row["number"] for row in reader.decoder.requests]
    assert rows == [*range(250, MOST_REQUESTS + 60), *range(249, 249 - MOST_ENDED, -1)]
