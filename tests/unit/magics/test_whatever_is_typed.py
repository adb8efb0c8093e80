"""Whatever stands behind a flag or in a cell: an answer, or one line that says what is wrong."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import NBEngineError
from nbengine.magics.generation.arguments import generate_parser
from nbengine.magics.scores.matching import MATCHERS
from tests.support.odd_values import ANYTHING, SURROGATE
from tests.support.thorough import amount
from tests.unit.magics.conftest import FakeClient

VALUES = (
    st.text(max_size=20)
    | st.integers().map(str)
    | st.floats().map(str)
    | st.sampled_from(
        ["", "-", "--", ",", "a,b", "0,1", "[1]", "{}", "{x}", "x" * 5000, "\\", "'", '"', SURROGATE]
    )
)
BODIES = st.text(max_size=30) | st.sampled_from(
    ["{", "}", "{x}", "{missing}", "{1/0}", "{{x}}", "\0", SURROGATE]
)
FLAGS = [flag for flag in generate_parser().flags if flag not in ("-h", "--help")]


def typed(shell: InteractiveShell, magic: str, line: str, body: str) -> None:
    """Run a cell; an error is one that a person can read, and nothing stays under way."""
    try:
        shell.run_cell_magic(magic, line, body)
    except (UsageError, NBEngineError) as error:
        message = str(error)
        assert message
        assert "Traceback" not in message
        assert message.count("\n") <= 1, message


@pytest.mark.parametrize("flag", FLAGS)
def test_any_value_behind_a_flag_is_taken_or_explained(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    shell.user_ns["x"] = "a value"

    @given(VALUES, BODIES)
    @example("9" * 400, "x")
    @example("nan", "x")
    @settings(max_examples=amount(12, thorough=1000), deadline=None)
    def run(value: str, body: str) -> None:
        typed(shell, "generate", f"{flag} {shlex.quote(value)}", body)
        capsys.readouterr()

    run()
    shell.run_cell("%%generate -o answer\nhi").raise_error()
    assert shell.user_ns["answer"].text == "Hello world"


@pytest.mark.parametrize("magic", ["generate", "chat"])
def test_any_line_and_any_body_are_taken_or_explained(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str], magic: str
) -> None:
    shell.user_ns["x"] = "a value"

    @given(st.text(max_size=40), BODIES)
    @settings(max_examples=amount(60, thorough=3000), deadline=None)
    def run(line: str, body: str) -> None:
        typed(shell, magic, line, body)
        capsys.readouterr()

    run()
    shell.run_cell("%%generate -o answer\nhi").raise_error()
    assert shell.user_ns["answer"].text == "Hello world"


def test_any_value_of_a_variable_is_taken_or_explained(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns["hidden"] = lambda result, row: len(row)

    @given(ANYTHING)
    @settings(max_examples=amount(60, thorough=3000), deadline=None)
    def run(value: Any) -> None:
        shell.user_ns["x"] = value
        shell.user_ns["items"] = [{"expected": value}]
        each = ("", "--expect y", "--expect x", "--score hidden")
        items = [f"--each items --expect expected --match {match}" for match in MATCHERS]
        for line in (
            "",
            *(f"--each x {flags}" for flags in each),
            *items,
            "--score x --seed 1,2",
            "--seed {x}",
        ):
            typed(shell, "generate", line, "{x}")
        capsys.readouterr()

    run()
