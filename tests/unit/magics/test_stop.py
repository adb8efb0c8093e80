"""A button beside an output that is being written ends its answer as an interrupt does, and is gone at the end."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.extension import Extension
from nbengine.widgets.stop import buttons
from nbengine.widgets.stop.buttons import StopButtons
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run, until
from tests.unit.magics.test_timeout import stuck

LINES = [
    "%%generate",
    "%%generate --format markdown",
    "%%generate --format json",
    "%%generate --seed 1,2",
    "%%chat",
]
MARK = re.compile(r'data-nbe-stream="(\w+)"')


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch, kernel_shell: InteractiveShell) -> Iterator[StopButtons]:
    """The buttons of a notebook that is open before a person."""
    monkeypatch.setattr(buttons, "_is_looked_at", lambda: True)
    stops = Extension.loaded[kernel_shell].session.ongoing.stops
    yield stops
    stops.close()


def streams(stops: StopButtons) -> dict[str, bool]:
    return {} if stops._widget is None else dict(stops._widget.streams)


def press(stops: StopButtons, key: str) -> None:
    """Do what the script's message does."""
    assert stops._widget is not None
    stops._widget._handle_custom_msg({"kind": "stop", "stream": key}, [])


def marks(shell: InteractiveShell) -> set[str]:
    """The marks in the outputs as they are now."""
    return {
        key
        for output in publisher(shell).outputs()
        for form in output.values()
        for key in MARK.findall(str(form))
    }


@pytest.mark.parametrize("line", LINES)
async def test_the_button_ends_the_answer_and_the_cell_and_keeps_the_text(
    kernel_shell: InteractiveShell, engine: FakeClient, stops: StopButtons, line: str
) -> None:
    stuck(engine)
    cell = asyncio.create_task(run(kernel_shell, f"{line} -o out\nhi"))
    await until(lambda: bool(marks(kernel_shell)))
    (key,) = marks(kernel_shell)
    assert streams(stops) == {key: True}
    press(stops, "of another output")
    press(stops, key)
    result = await cell
    assert type(result.error_in_exec).__name__ == "KeyboardInterrupt"
    out = kernel_shell.user_ns["out"]
    answers = list(out) if "seed" in line else [out.last if "chat" in line else out]
    assert {(answer.text, answer.finish_reason) for answer in answers} == {("So far", "abort")}
    assert streams(stops) == {}
    assert marks(kernel_shell) == set()
    # A click that comes too late ends nothing.
    press(stops, key)


async def test_the_button_ends_an_answer_in_the_background_without_an_error(
    kernel_shell: InteractiveShell, engine: FakeClient, stops: StopButtons
) -> None:
    stuck(engine)
    (await run(kernel_shell, "%%generate -a -o later\nhi")).raise_error()
    await until(lambda: bool(streams(stops)))
    ((key, is_foreground),) = streams(stops).items()
    assert not is_foreground
    press(stops, key)
    assert (await kernel_shell.user_ns["later"]).finish_reason == "abort"
    assert streams(stops) == {}


def test_a_cell_that_blocks_is_ended_from_another_thread(
    kernel_shell: InteractiveShell, engine: FakeClient, stops: StopButtons
) -> None:
    stuck(engine)

    def press_when_shown() -> None:
        publisher(kernel_shell).wait_for("So far")
        press(stops, next(iter(streams(stops))))

    thread = threading.Thread(target=press_when_shown)
    thread.start()
    result = kernel_shell.run_cell("%%generate -o out\nhi")
    thread.join()
    assert type(result.error_in_exec).__name__ == "KeyboardInterrupt"
    assert (kernel_shell.user_ns["out"].text, kernel_shell.user_ns["out"].finish_reason) == (
        "So far",
        "abort",
    )
    assert streams(stops) == {}


@pytest.mark.parametrize("environment", [{}, {"JPY_SESSION_NAME": "a.ipynb"}])
async def test_where_nobody_looks_at_the_notebook_no_widget_is_made(
    kernel_shell: InteractiveShell,
    engine: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(buttons, "get_ipython", lambda: kernel_shell)
    stops = Extension.loaded[kernel_shell].session.ongoing.stops
    (await run(kernel_shell, "%%generate\nhi")).raise_error()
    assert (stops._widget is not None) == bool(environment)
    stops.close()
