"""Whatever stands behind a flag or in a cell: an answer, or one line that says what is wrong."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.config import EngineArgs
from nbengine.errors import NBEngineError
from nbengine.magics.arguments import MagicParser
from nbengine.magics.conversations.arguments import chat_parser
from nbengine.magics.dashboard import DashboardMagics
from nbengine.magics.dashboard_arguments import dashboard_parser
from nbengine.magics.generation.arguments import generate_parser
from nbengine.magics.kept_runs.arguments import PARSERS, runs_parser
from nbengine.magics.kept_runs.repeating import rerun_parser
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
).filter(lambda value: not {"/", "~"} & set(value))
"""Words of a line; none of them is a file outside of the directory of the test."""
BODIES = st.text(max_size=30) | st.sampled_from(
    ["{", "}", "{x}", "{missing}", "{1/0}", "{{x}}", "\0", SURROGATE]
)
HELP = ("-h", "--help")

FLAGS = [
    (magic, flag)
    for magic, parser in (("generate", generate_parser()), ("chat", chat_parser()))
    for flag in parser.flags
    if flag not in HELP
]


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the files that flags such as `--save` write."""
    monkeypatch.chdir(tmp_path)


def typed(shell: InteractiveShell, magic: str, line: str, body: str | None = None) -> None:
    """Run a cell, or a line; an error is one that a person can read, and nothing stays under way."""
    try:
        if body is None:
            shell.run_line_magic(magic, line)
        else:
            shell.run_cell_magic(magic, line, body)
    except (UsageError, NBEngineError) as error:
        message = str(error)
        assert message
        assert "Traceback" not in message
        assert message.count("\n") <= 1, message


@pytest.mark.parametrize(("magic", "flag"), FLAGS)
def test_any_value_behind_a_flag_is_taken_or_explained(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str], magic: str, flag: str
) -> None:
    shell.user_ns["x"] = "a value"

    @given(VALUES, BODIES)
    @example("9" * 400, "x")
    @example("nan", "x")
    @settings(max_examples=amount(3, thorough=1000), deadline=None)
    def run(value: str, body: str) -> None:
        typed(shell, magic, f"{flag} {shlex.quote(value)}", body)
        capsys.readouterr()

    run()
    shell.run_cell("%%generate -o answer\nhi").raise_error()
    assert shell.user_ns["answer"].text == "Hello world"


def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands check what they are given, and start nothing and wait for nothing."""

    def fit(**arguments: Any) -> Any:
        arguments.pop("progress", None)
        EngineArgs.from_kwargs(arguments).create_engine_config(bound=True)
        return SimpleNamespace(tables=lambda: ("", ""))

    monkeypatch.setattr("nbengine.frontend.fit.fit", fit)
    monkeypatch.setattr(
        "nbengine.magics.engines.serving.start_server", lambda *_: SimpleNamespace(process=None, url="here")
    )
    monkeypatch.setattr("nbengine.magics.engines.serving.stop_server", lambda *_, **__: None)
    monkeypatch.setattr("nbengine.magics.engines.serving.is_alive", lambda _: False)
    monkeypatch.setattr("nbengine.magics.engines.logs.follow_log", lambda *_: iter(()))
    monkeypatch.setattr(DashboardMagics, "_watch", lambda *_: None)
    monkeypatch.setattr("builtins.input", lambda _: "no")


def parsers_of_lines(shell: InteractiveShell) -> dict[tuple[str, str], MagicParser]:
    """The parsers of all line magics, by magic and command."""
    registry = shell.magics_manager.registry
    engine = registry["EngineMagics"]
    found = {("engine", name): engine.parser_of(name) for name in engine.command_names}
    found |= {("runs", name): make() for name, make in PARSERS.items()}
    found |= {
        ("runs", "rerun"): rerun_parser(),
        ("runs", ""): runs_parser(),
        ("dashboard", ""): dashboard_parser(),
    }
    return {line: parser for line, parser in found.items() if parser is not None}


def test_any_value_behind_a_flag_of_a_line_is_taken_or_explained(
    shell: InteractiveShell,
    engine: FakeClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every command of `%engine`, `%runs` and `%dashboard`; the parsers say which flags there are."""
    shell.user_ns["x"] = "a value"
    without_processes(monkeypatch)
    parsers = parsers_of_lines(shell)
    assert {magic for magic, _ in parsers} == {"engine", "runs", "dashboard"}
    assert {command for magic, command in parsers if magic == "engine"} == {
        *shell.magics_manager.registry["EngineMagics"].command_names
    } - {"help"}
    assert {command for magic, command in parsers if magic == "runs"} == {
        "",
        *shell.magics_manager.registry["RunsMagics"]._commands,
    }
    flags = [
        (*line, flag) for line, parser in parsers.items() for flag in ("", *parser.flags) if flag not in HELP
    ]

    @given(st.sampled_from(flags), VALUES)
    @settings(max_examples=amount(25, thorough=20_000), deadline=None)
    def run(line: tuple[str, str, str], value: str) -> None:
        magic, command, flag = line
        typed(shell, magic, f"{command} {flag} {shlex.quote(value)}")
        typed(shell, magic, f"{command} {flag}")
        capsys.readouterr()

    run()
    shell.run_cell("%engine start random-tiny\n")
    shell.run_cell("%%generate -o answer\nhi").raise_error()
    assert shell.user_ns["answer"].text == "Hello world"


@pytest.mark.parametrize("magic", ["generate", "chat"])
def test_any_line_and_any_body_are_taken_or_explained(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str], magic: str
) -> None:
    shell.user_ns["x"] = "a value"

    @given(st.text(max_size=40), BODIES)
    @settings(max_examples=amount(25, thorough=3000), deadline=None)
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
    @settings(max_examples=amount(25, thorough=3000), deadline=None)
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
