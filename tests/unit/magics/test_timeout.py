"""`--timeout`: an answer that takes too long is ended, with what there is of it, and the cell says so."""

from __future__ import annotations

import re

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run


def stuck(engine: FakeClient) -> None:
    """Let each answer begin, and end only when it is aborted."""
    engine.words = None
    submit = engine.submit

    def begun(*arguments: object, **options: object) -> object:
        collector = submit(*arguments, **options)  # type: ignore[arg-type]
        engine.emit("So far")
        return collector

    def abort(request_id: str) -> None:
        engine.aborted.append(request_id)
        engine.emit("", "abort", int(request_id.rpartition("-")[2]) - 1)

    engine.submit = begun  # type: ignore[method-assign,assignment]
    engine.abort_soon = abort  # type: ignore[method-assign]


@pytest.mark.parametrize("lists", ["", "--seed 1,2 "])
def test_a_blocking_cell_ends_with_what_there_is(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str], lists: str
) -> None:
    stuck(engine)
    shell.run_cell(f"%%generate {lists}--timeout 0.05 -o out\nhi").raise_error()
    results = list(shell.user_ns["out"]) if lists else [shell.user_ns["out"]]
    assert {(result.text, result.finish_reason) for result in results} == {("So far", "abort")}
    assert len(engine.aborted) == len(results)
    assert "--timeout: ended after 50 ms" in capsys.readouterr().out


async def test_so_does_a_cell_that_is_awaited(kernel_shell: InteractiveShell, engine: FakeClient) -> None:
    stuck(engine)
    (await run(kernel_shell, "%%generate --timeout 0.05 -o out\nhi")).raise_error()
    assert kernel_shell.user_ns["out"].finish_reason == "abort"
    assert "--timeout: ended after 50 ms" in publisher(kernel_shell).outputs()[-1]["text/plain"]


async def test_and_one_in_the_background(kernel_shell: InteractiveShell, engine: FakeClient) -> None:
    stuck(engine)
    (await run(kernel_shell, "%%generate -a --timeout 0.05 -o out\nhi")).raise_error()
    assert (await kernel_shell.user_ns["out"]).text == "So far"


def test_an_answer_in_time_says_nothing_of_it(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%%generate --timeout 3600 -o out\nhi").raise_error()
    assert shell.user_ns["out"].text == "Hello world"
    assert "timeout" not in capsys.readouterr().out
    assert engine.aborted == []


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_wrong_time_is_refused(shell: InteractiveShell, engine: FakeClient, value: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"a number of seconds above 0, got '{value}'")):
        shell.run_cell(f"%%generate --timeout={value}\nhi").raise_error()
    assert not engine.requests
