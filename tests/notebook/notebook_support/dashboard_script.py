"""Frames for the dashboard's script by hand, and looks at what it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from dashboard_frames import NUMBERS, START, FakeEngine, Frame, table_change
from dashboard_page import DashboardPage

BLOCKS = ".nbe-map canvas"
TIMELINE = ".nbe-timeline canvas"
TIP = ".nbe-tip:not([hidden])"
GUTTER, AXIS, LARGEST = 56, 20, 26

OpenPage = Callable[..., DashboardPage]


def step(number: int, entries: list[int] | None = None, **how: Any) -> list[Any]:
    running, waiting = how.get("running", 1), how.get("waiting", 0)
    end = [entries, how.get("preempted"), how.get("finished")]
    return [number, START + number * 0.01, how.get("seconds", 0.01), running, waiting, 90, 10, *end]


STEPS = [
    step(1, [0, 64, 1, -1], seconds=0.25, waiting=2),
    step(2, [0, 36, 1, -1, 1, 28, 1, 32]),
    step(3, [0, 1, 0, -1, 1, 1, 0, -1]),
    step(4),
    step(5),
    step(6, [0, 1, 0, -1], preempted=[1], waiting=1),
    step(7),
    step(8, [0, 1, 0, -1, 1, 60, 2, 0], finished=[0]),
    step(9, [1, 1, 0, -1], seconds=None),
]


def request(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "rank": 0,
        "number": number,
        "id": f"cmpl-{number}",
        "client": 0,
        "state": "running",
        "num_prompt_tokens": 100,
        "num_cached_tokens": 32,
        "num_computed_tokens": 80,
        "num_output_tokens": 5,
        "max_total_tokens": 150,
        "num_preemptions": 0,
        "added_at": START,
        "first_token_at": None,
        "ended_at": None,
        "finish_reason": None,
        "own": True,
        "foreground": False,
        "preview": "Once upon a time",
    } | fields


def word(references: int, cached: bool = False, holder: int | None = None) -> int:
    return min(references, 4095) | cached << 12 | (NUMBERS if holder is None else holder % NUMBERS) << 13


def frame(
    seq: int = 1,
    *,
    reset: bool = True,
    steps: list[list[Any]] | None = None,
    words: list[int] | None = None,
    changed: dict[int, int] | None = None,
    requests: list[dict[str, Any]] | None = None,
    engine: dict[str, Any] | None = None,
    **info: Any,
) -> Frame:
    """A frame of one engine core, by hand."""
    content, _ = FakeEngine(num_blocks=1).frame(reset=True)
    buffers = []
    rank = content["ranks"][0]
    if words is not None:
        buffers, rank["blocks"] = [np.array(words, "<u4").tobytes()], {"buffer": 0, "full": True}
    elif changed is not None:
        pairs = np.array(list(changed.items()), "<u4")
        buffers, rank["blocks"] = [pairs.tobytes()], {"buffer": 0, "full": False}
    else:
        rank["blocks"] = None
    rank.update(steps=steps or [], requests=table_change({}, requests or []), **info)
    content["engine"].update(engine or {})
    content.update(seq=seq, reset=reset)
    return content, buffers


def rgb(color: str) -> np.ndarray[Any, Any]:
    return np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)])


def assert_color(pixel: tuple[int, ...], color: str, opacity: float = 1, ground: str = "#ffffff") -> None:
    expected = opacity * rgb(color) + (1 - opacity) * rgb(ground)
    assert np.abs(np.array(pixel[:3]) - expected).max() <= 2, (pixel, expected)


def cell(page: DashboardPage, index: int) -> tuple[float, float]:
    """The place of a block's cell in a map of few blocks: its upper left quarter."""
    columns = int(page.page.evaluate("document.querySelector('.nbe-map canvas').clientWidth")) // LARGEST
    return (index % columns) * LARGEST + 4, (index // columns) * LARGEST + 4


def column(page: DashboardPage, ordinal: int, count: int, scale: float = 6) -> float:
    """The middle of a step's column while the newest step is at the right edge."""
    width = float(page.page.evaluate("document.querySelector('.nbe-timeline canvas').clientWidth"))
    return width - (count - ordinal - 0.5) * scale


def hover(page: DashboardPage, canvas: str, x: float, y: float) -> str:
    page.page.hover(canvas, position={"x": x, "y": y})
    page.settle()
    return page.text(TIP) if page.page.locator(TIP).count() else ""


def freeze(page: DashboardPage) -> None:
    """From now on the page's time passes when the test says so."""
    page.is_frozen = True
    page.page.clock.install(time=0)
    page.page.clock.pause_at(1000)


def tile(page: DashboardPage, label: str) -> str:
    return page.page.locator(".nbe-tile", has_text=label).locator(".nbe-value").inner_text()
