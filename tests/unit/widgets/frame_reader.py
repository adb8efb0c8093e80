"""A script's side of the frames: what it has read, compared with what the mirror knows."""

from __future__ import annotations

import pytest

from nbengine.client.observe.trace_mirror import RequestView, TraceMirror
from nbengine.widgets.dashboard.frames import MOST_ENDED, Frame, FrameBuilder
from nbengine.widgets.following.dashboard_state import DashboardState
from tests.unit.widgets.frame_decoder import FrameDecoder, unpacked


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Reader:
    """A builder and its reader."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.builder = FrameBuilder(lambda added: f"prompt {added.number}", self.clock)
        self.decoder = FrameDecoder()
        self.frames: list[Frame] = []

    def take(self, state: DashboardState, **options: bool) -> Frame | None:
        frame = self.builder.build(state, **options)
        if frame is not None:
            self.frames.append(frame)
            self.decoder.take(frame.content, frame.buffers)
        return frame

    def take_all(self, state: DashboardState) -> None:
        """Take everything that there is to tell."""
        while self.take(state) is not None:
            assert len(self.frames) < 5000


def kinds_of(mirror: TraceMirror) -> list[list[tuple[int, int, int, int]]]:
    """The entries of all steps, from their beginning."""
    lost_work: set[int] = set()
    steps = []
    for step in mirror.steps:
        lost_work |= set(step.resumed)
        entries = []
        for at, number in enumerate(step.numbers):
            if number not in step.prefills:
                lost_work.discard(number)
            kind = 0 if number not in step.prefills else 2 if number in lost_work else 1
            hit = step.num_computed[at] if number in step.admitted else -1
            entries.append((number, step.num_tokens[at], kind, hit))
        steps.append(entries)
    return steps


def assert_same(decoder: FrameDecoder, mirror: TraceMirror, *, kinds: bool = True) -> None:
    """Check that the reader of frames knows what the mirror knows."""
    known = decoder.ranks[mirror.engine_index]
    blocks = mirror.blocks
    assert [unpacked(word) for word in known.words] == [
        (min(int(blocks.ref_counts[b]), 4095), bool(blocks.cached[b]), int(blocks.holder[b]) % (2**19))
        if blocks.holder[b] >= 0
        else (min(int(blocks.ref_counts[b]), 4095), bool(blocks.cached[b]), 2**19 - 1)
        for b in range(blocks.num_blocks)
    ]
    assert [step.step for step in known.steps] == [step.step for step in mirror.steps]
    for decoded, step in zip(known.steps, mirror.steps, strict=True):
        assert decoded.time == pytest.approx(step.time, abs=1e-4)
        assert decoded.seconds == (None if step.seconds is None else pytest.approx(step.seconds, abs=1e-6))
        assert decoded.figures == (
            step.num_running,
            step.num_waiting,
            step.num_free_blocks,
            step.num_cached_blocks,
        )
        assert decoded.preempted == list(step.preempted)
        assert decoded.finished == list(step.finished)
    if kinds:
        assert [step.entries for step in known.steps] == kinds_of(mirror)
    rows = [row for row in decoder.requests if row["rank"] == mirror.engine_index]
    ended = list(reversed(mirror.finished.values()))[:MOST_ENDED]
    ended.sort(key=lambda view: (-(view.ended_at or 0), view.added.number))
    assert rows == [row_of(mirror.engine_index, view) for view in [*mirror.requests.values(), *ended]]


def row_of(rank: int, view: RequestView) -> dict[str, object]:
    """Make the row that the table has of a request that is not this notebook's."""
    added = view.added
    return {
        "rank": rank,
        "number": added.number,
        "id": added.request_id,
        "client": 0,
        "state": view.state,
        "num_prompt_tokens": added.num_prompt_tokens,
        "num_cached_tokens": view.num_cached_tokens,
        "num_computed_tokens": view.num_computed_tokens,
        "num_output_tokens": view.num_output_tokens,
        "max_total_tokens": added.max_total_tokens,
        "num_preemptions": view.num_preemptions,
        "added_at": pytest.approx(added.time, abs=1e-4),
        "first_token_at": moment(view.first_token_at),
        "ended_at": moment(view.ended_at),
        "finish_reason": view.finish_reason,
        "own": False,
        "foreground": False,
        "preview": f"prompt {added.number}",
    }


def moment(seconds: float | None) -> object:
    return None if seconds is None else pytest.approx(seconds, abs=1e-4)
