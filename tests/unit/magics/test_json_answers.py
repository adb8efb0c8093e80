"""Answers that are to be JSON, and that Python does not read as such."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine import IncompleteOutputError
from nbengine.outputs import CompletionOutput
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run

UNREADABLE = ["[" * 2000, "1" * 5000]


@pytest.mark.parametrize("text", UNREADABLE)
def test_value_of_json_that_python_does_not_read_says_so(
    shell: InteractiveShell, engine: FakeClient, text: str
) -> None:
    engine.words = [text]
    shell.run_cell("%%generate --json -o answer\nMore\n").raise_error()
    with pytest.raises(IncompleteOutputError, match=r"JSON that cannot be read: .* \(.text has it\)"):
        _ = shell.user_ns["answer"].value
    shell.user_ns["answer"].abort("length")
    shell.user_ns["answer"].outputs[0] = CompletionOutput(0, text, [1], finish_reason="length")
    with pytest.raises(
        IncompleteOutputError,
        match=r"was cut off after 1 tokens, where .* start the engine with a greater --max-model-len \(\.text",
    ):
        _ = shell.user_ns["answer"].value


@pytest.mark.parametrize("text", UNREADABLE)
@pytest.mark.parametrize(
    "line", ["--json", "--json -a", "-f json", "-f json --seed 1,2", "-f json --seed 1,2 -a"]
)
async def test_json_that_python_does_not_read_ends_its_cell_as_other_answers_do(
    kernel_shell: InteractiveShell, engine: FakeClient, text: str, line: str
) -> None:
    engine.words = ["[1, ", text]
    (await run(kernel_shell, f"%%generate {line} -o answer\nMore\n")).raise_error()
    if "-a" in line:
        await kernel_shell.user_ns["answer"]
    (shown,) = publisher(kernel_shell).outputs()
    assert shown["text/plain"].count(text) == (2 if "--seed" in line else 1)
    assert "[2 tokens" in shown["text/plain"]
    publisher(kernel_shell).messages.clear()
    kernel_shell.run_cell("%engine recover -f json").raise_error()
    assert "not readable JSON" in publisher(kernel_shell).outputs()[1]["text/plain"]
