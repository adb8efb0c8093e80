"""The dashboard shows blocks in cells, steps in a grid, loads over time, and figures in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.client.observe.trace_mirror import BlockMap, RequestView, StepView, TraceMirror
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.metrics.trace import RequestAdded
from nbengine.widgets.dashboard.palette import REQUESTS
from nbengine.widgets.dashboard.step_frames import DECODE, PROMPT, RECOMPUTED
from nbengine.widgets.following.dashboard_state import Rates
from nbengine.widgets.pictures.blocks import cells_of, summary, top_holders
from nbengine.widgets.pictures.figures import (
    count,
    duration,
    header,
    hit_rate,
    kv_use,
    request_rows,
    share,
    title,
)
from nbengine.widgets.pictures.loads import SECONDS, loads_of
from nbengine.widgets.pictures.steps import grid_of
from tests.unit.widgets.dashboards import START, SmallEngine, busy_engine, state_of, vast_mirror


def block_map(references: list[int], cached: list[bool], holders: list[int]) -> BlockMap:
    blocks = BlockMap(len(references), 4)
    blocks.ref_counts[:] = references
    blocks.cached[:] = cached
    blocks.holder[:] = holders
    return blocks


BLOCKS = st.lists(
    st.tuples(st.integers(0, 12), st.booleans(), st.integers(-1, 40)), min_size=1, max_size=300
).map(lambda rows: block_map(*map(list, zip(*rows, strict=True))))


@given(BLOCKS, st.integers(1, 400))
def test_every_block_is_in_one_cell_as_what_it_is(blocks: BlockMap, max_cells: int) -> None:
    cells = cells_of(blocks, max_cells)
    width = cells.blocks_per_cell
    assert len(cells.total) <= max_cells
    assert width == 1 or blocks.num_blocks > max_cells
    assert cells.total.sum() == blocks.num_blocks
    for index in range(len(cells.total)):
        ids = range(index * width, min(blocks.num_blocks, (index + 1) * width))
        held = [block for block in ids if blocks.ref_counts[block]]
        idle = [block for block in ids if not blocks.ref_counts[block]]
        assert cells.held[index] == len(held)
        assert cells.cached[index] == sum(bool(blocks.cached[block]) for block in idle)
        assert cells.total[index] == cells.held[index] + cells.cached[index] + cells.free[index] == len(ids)
        assert cells.shared[index] == sum(blocks.ref_counts[block] > 1 for block in ids)
        assert cells.most_references[index] == max(blocks.ref_counts[block] for block in ids)
        colors = [max(0, int(blocks.holder[block])) % len(REQUESTS) for block in held]
        if held:
            most = max(colors.count(color) for color in colors)
            assert colors.count(int(cells.color[index])) == most
            assert cells.holder[index] == blocks.holder[held[0]]
        else:
            assert cells.color[index] == cells.holder[index] == -1


def test_sums_of_many_blocks_agree_with_the_map() -> None:
    blocks = vast_mirror().blocks
    cells = cells_of(blocks, 1968)
    assert cells.blocks_per_cell == 51
    assert cells.held.sum() == blocks.num_blocks - blocks.num_free_blocks
    assert cells.cached.sum() == np.count_nonzero(blocks.cached & (blocks.ref_counts == 0))
    assert cells.shared.sum() == np.count_nonzero(blocks.ref_counts > 1)


def test_the_line_about_blocks_says_how_many_there_are_of_each_kind() -> None:
    mirror = TraceMirror(0)
    blocks = block_map([0, 0, 0, 1, 2, 3], [True, False, False, True, True, False], [1, 2, -1, 3, 3, 4])
    mirror.blocks, line = blocks, "6 blocks of 4 tokens: 3 held (2 shared), 1 cached and free, 2 free"
    assert summary(mirror) == line
    mirror.stats = SchedulerStats(num_state_slots=9, num_free_state_slots=7, num_checkpoints=1)
    assert summary(mirror) == f"{line}; 2 of 9 state slots held, 1 checkpoint"
    assert top_holders(blocks, 5) == [(3, 2), (4, 1)]
    assert top_holders(blocks, 1) == [(3, 2)]


def rows_of(mirror: TraceMirror, steps: int = 100, rows: int = 20) -> dict[int, str]:
    """Write rows by number: P, D, R a column, "h", "x" and "|" after it for hits, preemptions and the end."""
    letters = {None: ".", PROMPT: "P", DECODE: "D", RECOMPUTED: "R"}
    text = {}
    for row in grid_of(mirror, steps, rows).rows:
        columns = [letters[kind] for kind in row.kinds]
        for marks, mark in ((row.hits, "h"), (row.preempted, "x")):
            for column in marks:
                columns[column] += mark
        if row.finished is not None:
            columns[row.finished] += "|"
        text[row.number] = "".join(columns)
    return text


def test_a_prompt_in_chunks_a_hit_and_an_end_are_where_they_happened() -> None:
    engine = SmallEngine(num_blocks=40, budget=8)
    engine.add(20, 3, group=0)
    engine.run(3)
    engine.add(20, 2, group=0)
    engine.run(5)
    # The second step computes 8 more of 20 tokens, the third the last 4; the second request finds 16 of its 20.
    assert rows_of(engine.mirror) == {0: "PPPDD|", 1: "...PhD|"}


def test_what_was_lost_in_a_preemption_is_told_from_a_prompt() -> None:
    engine = SmallEngine(num_blocks=8, budget=16, block_size=4)
    engine.add(12, 9)
    engine.add(12, 9)
    engine.run(40)
    first, second = rows_of(engine.mirror).values()
    assert first.startswith("PDDDDDDDD|.")
    before, after = second.split("x")
    assert before.replace(".", "") == "PPDDD"
    assert after.replace(".", "") == "RDDDD|"


def test_only_the_last_steps_and_the_latest_requests_are_in_the_grid() -> None:
    engine = busy_engine()
    whole = rows_of(engine.mirror, 1000, 1000)
    grid = grid_of(engine.mirror, 20, 3)
    assert [step.step for step in grid.steps] == [step.step for step in engine.mirror.steps][-20:]
    assert {row.number for row in grid.rows} <= set(whole)
    assert set(engine.mirror.requests) <= {row.number for row in grid.rows}
    part = grid_of(engine.mirror, 20, 1000)
    assert len(part.rows) == len(grid.rows) + grid.num_more
    everything = {row.number: row for row in grid_of(engine.mirror, 1000, 1000).rows}
    shift = len(engine.mirror.steps) - 20
    for row in part.rows:
        full = everything[row.number]
        assert row.kinds == full.kinds[shift:]
        assert row.preempted == tuple(column - shift for column in full.preempted if column >= shift)
        assert row.finished == (None if full.finished is None else full.finished - shift)


def step_at(time: float, seconds: float | None, running: int, waiting: int, lost: int = 0) -> StepView:
    preempted = range(lost)
    return StepView(
        0, time, [], [], [], preempted=preempted, seconds=seconds, num_running=running, num_waiting=waiting
    )


def test_loads_are_those_of_the_steps_that_ran_then() -> None:
    mirror = TraceMirror(0)
    mirror.steps.extend(
        [
            step_at(START - SECONDS - 1, 0.1, 99, 99),
            step_at(START, 1.0, 3, 1),
            step_at(START + 5, 1.0, 2, 7, lost=2),
            step_at(START + 11, 1.0, 4, 0),
        ]
    )
    loads = loads_of(mirror, 120)
    assert loads.seconds == pytest.approx(12)
    assert len(loads.running) == len(loads.waiting) == 120
    per_second = 10
    assert loads.running[0] == 3
    assert loads.waiting[0] == 1
    assert loads.running[2 * per_second] is None, "no step ran then"
    assert loads.running[5 * per_second + 1] == 2
    assert loads.waiting[5 * per_second + 1] == 7
    assert loads.running[-1] == 4
    assert sum(loads.preempted) == loads.preempted[5 * per_second] == 2
    assert loads_of(TraceMirror(0), 120).running == ()


def test_figures_are_as_exact_as_they_are_known() -> None:
    assert [count(value) for value in (None, 0, 3, 3.25, 1234.5)] == ["–", "0", "3", "3.2", "1,234"]
    assert [duration(value) for value in (None, 0.00041, 0.0123, 0.9999, 12.34, 200)] == [
        "–",
        "0.41 ms",
        "12.3 ms",
        "1 s",
        "12.3 s",
        "3 min 20 s",
    ]
    assert duration(119.7) == "2 min 0 s"
    assert share(1, 3) == "33.3 %"
    assert share(0, 0) == "–"
    engines = [
        SchedulerStats(0, num_blocks=10, num_free_blocks=5, prefix_cache_queries=30, prefix_cache_hits=3),
        SchedulerStats(1, num_blocks=30, num_free_blocks=25, prefix_cache_queries=10, prefix_cache_hits=9),
    ]
    assert kv_use(engines) == "25 %"
    assert hit_rate(engines) == "30 %"
    assert kv_use([]) == hit_rate([]) == "–"


def test_what_is_not_known_shows_as_a_dash() -> None:
    state = state_of(rates=Rates())
    assert state.stats == EngineStats([], timestamp=START)
    assert {value for _, value in header(state)} == {"–"}


def test_the_header_has_what_the_state_has() -> None:
    state = state_of(busy_engine())
    assert title(state) == ("random-tiny", "engine demo · 1 engine core · cpu · float32")
    stats = state.stats.engines[0]
    assert dict(header(state)) == {
        "tokens in": "1,234/s",
        "tokens out": "88/s",
        "first token": "12.3 ms",
        "between tokens": "3.45 ms",
        "memory": "312 MiB",
        "KV use": f"{100 * stats.kv_cache_usage:.3g} %",
        "prefix hits": f"{100 * stats.prefix_cache_hits / stats.prefix_cache_queries:.3g} %",
        "requests": f"{stats.num_running_reqs} running",
    }


def test_rows_of_requests_have_what_is_published() -> None:
    engine = busy_engine()
    rows, num_more = request_rows(state_of(engine, own={"generate-7": True}))
    mirror = engine.mirror
    assert num_more == 0
    assert len(rows) == 14
    assert [row.number for row in rows[: len(mirror.requests)]] == list(mirror.requests)
    for row in rows:
        view = mirror.requests.get(row.number) or mirror.finished[row.number]
        assert row.name == view.added.request_id
        assert row.output == str(view.num_output_tokens)
        assert row.preemptions == str(view.num_preemptions)
        assert row.is_own == (row.name == "generate-7")
        assert row.cached + row.computed == min(view.num_computed_tokens, view.added.num_prompt_tokens)
        assert row.done == pytest.approx(
            (row.cached + row.computed + view.num_output_tokens) / view.added.max_total_tokens
        )
    assert any(row.prompt.endswith("cached)") for row in rows)
    some, left = request_rows(state_of(engine), limit=5)
    assert (len(some), left) == (5, 9)


def test_a_request_that_waits_has_no_times_but_its_age() -> None:
    mirror = TraceMirror(0)
    mirror.requests[3] = RequestView(RequestAdded(3, "later", 0, START - 2, 10, 20, []))
    state = replace(state_of(), mirrors={0: mirror})
    (row,) = request_rows(state)[0]
    assert (row.state, row.first_token, row.total_time, row.output, row.prompt) == (
        "waiting",
        "–",
        "2 s",
        "0",
        "10",
    )
    assert row.done == 0
