"""`%runs` finds what was asked, shows it, compares it and asks it again."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from IPython.core.error import StdinNotImplementedError, UsageError
from IPython.core.interactiveshell import InteractiveShell
from runs_made import made_run

import nbengine
from nbengine.frontend.runs.place import store_path
from nbengine.frontend.runs.run import Limits
from nbengine.frontend.runs.store import RunStore
from tests.unit.magics.conftest import FakeBackend, FakeClient
from tests.unit.magics.kept_answers import Capture, said
from tests.unit.magics.kernel_cells import publisher, run, until


def rows() -> list[dict[str, Any]]:
    """Return the rows of all kept runs."""
    return nbengine.runs().rows()


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word.
    """
    return f"{word} is a word"


def kept(*runs: dict[str, Any]) -> RunStore:
    """Keep runs where the notebook finds them."""
    store = RunStore(store_path())
    store.add([made_run(**each) for each in runs], Limits())
    return store


def test_the_list_has_the_latest_first_and_what_is_asked_for(
    shell: InteractiveShell, capsys: Capture
) -> None:
    assert "no run has been kept yet" in said(shell, "%runs", capsys)
    kept(
        {"prompt": "the first", "model": "qwen"},
        {"prompt": "the second", "engine": "other"},
        {"prompt": "the third", "error": "RequestError: x", "finish_reason": "error"},
    )

    def listed(line: str) -> list[str]:
        return re.findall(r"^(\d+) ", said(shell, line, capsys), re.MULTILINE)

    assert listed("%runs") == ["3", "2", "1"]
    assert listed("%runs --last 2") == ["3", "2"]
    assert listed('%runs --find "THE FIRST"') == ["1"]
    shell.user_ns["word"] = "second"
    assert listed("%runs --find {word}") == ["2"]
    assert listed("%runs --model qwen") == ["1"]
    assert listed("%runs --engine other") == ["2"]
    assert listed("%runs --errors") == ["3"]
    assert "failed: RequestError: x" in said(shell, "%runs --errors", capsys)
    assert "no run fits" in said(shell, "%runs --find nothing", capsys)
    with pytest.raises(UsageError, match="does not tell which notebook"):
        shell.run_cell("%runs --here").raise_error()


def test_the_list_can_be_that_of_this_notebook(
    shell: InteractiveShell, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "/mine.ipynb")
    kept(
        {"prompt": "of mine", "notebook": "/mine.ipynb"}, {"prompt": "of another", "notebook": "/other.ipynb"}
    )
    shown = said(shell, "%runs --here", capsys)
    assert "of mine" in shown
    assert "of another" not in shown


def test_a_run_is_shown_with_all_that_is_kept(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%generate --temperature 0.25 why not?", capsys)
    said(shell, '%runs note 1 it\'s "good", {really}', capsys)
    said(shell, "%runs pin 1", capsys)
    shown = said(shell, "%runs show 1 -o first", capsys)
    for part in (
        "run 1, pinned, asked at ",
        "model random-tiny, engine 'random-tiny', nbengine ",
        "temperature 0.25",
        "max_tokens 512, n 1",
        'note: it\'s "good", {really}',
        "> why not?",
        "Hello world",
        "complete · 3 tokens",
    ):
        assert part in shown
    assert shell.user_ns["first"]["note"] == 'it\'s "good", {really}'
    assert "pinned" in said(shell, "%runs", capsys)
    assert "no longer pinned" in said(shell, "%runs pin 1 --off", capsys)
    assert "has no note" in said(shell, "%runs note 1", capsys)
    assert nbengine.runs()[1]["note"] == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%runs show 7", "%runs show: run must be the number of a kept run"),
        ("%runs show seven", "'seven' is not the number of a run"),
        ("%runs show", "the following arguments are required: N"),
        ("%runs shwo 7", "no command 'shwo'.*show"),
        ("%runs --fnd x", "unknown flag --fnd.*--find"),
        ("%runs --last 0", "'0' is not a whole number, at least 1"),
        ("%runs diff 1", "the following arguments are required: M"),
        ("%runs rerun x", "%runs rerun: 'x' is not the number of a run"),
        ("%runs rerun 1 hello", "unexpected 'hello'"),
        ("%runs rerun 1 --tempratur 0", "%runs rerun: unknown flag --tempratur"),
        ("%runs note", "the following arguments are required: N"),
        ("%runs clear --older-than 3", "'3' is not an age such as"),
    ],
)
def test_a_line_that_cannot_be_understood_is_one_sentence(
    shell: InteractiveShell, engine: FakeClient, line: str, message: str
) -> None:
    kept({"settings": {"chat": False}})
    with pytest.raises(UsageError, match=message):
        shell.run_cell(line).raise_error()


@pytest.mark.parametrize("command", ["", "show", "diff", "rerun", "pin", "note", "clear"])
def test_every_command_explains_itself(shell: InteractiveShell, capsys: Capture, command: str) -> None:
    shown = said(shell, f"%runs {command} -h", capsys)
    assert f"usage: %runs {command}".rstrip() in shown


def test_a_difference_names_words_and_settings(shell: InteractiveShell, capsys: Capture) -> None:
    kept(
        {"text": "a red house", "settings": {"temperature": 0.0, "n": 1}, "model": "one"},
        {"text": "a blue house", "settings": {"temperature": 0.7, "n": 1, "seed": 3}, "model": "two"},
    )
    shown = said(shell, "%runs diff 1 2", capsys)
    assert 'run 1 → run 2: model "one" → "two", temperature 0 → 0.7, seed none → 3' in shown
    assert "a [-red-]{+blue+} house" in shown
    assert "the same settings" in said(shell, "%runs diff 1 1", capsys)


def test_text_stays_text(kernel_shell: InteractiveShell) -> None:
    evil = "<script>alert(1)</script> \x1b[31m {x}"
    kept(
        {
            "prompt": evil,
            "text": evil,
            "model": evil,
            "engine": evil,
            "error": evil,
            "notebook": evil,
            "model_version": evil,
            "settings": {"system": evil},
            "varied": {"word": evil},
        },
        {"prompt": evil, "text": evil, "outputs": [{"text": evil}, {"text": evil}]},
    )
    kernel_shell.run_cell(f"%runs note 1 {evil}").raise_error()
    lines = [
        "%runs",
        "%runs show 1",
        "%runs show 2",
        "%runs show 1 -f code",
        "%runs show 1 -f markdown",
        "%runs diff 1 2",
    ]
    for line in lines:
        kernel_shell.run_cell(line).raise_error()
    shown = publisher(kernel_shell).outputs()
    assert len(shown) >= len(lines)
    for bundle in shown:
        assert "<script" not in bundle.get("text/html", "")
        assert "<script" not in bundle.get("text/markdown", "").replace("```", "")
        assert "<script" in bundle["text/plain"] or bundle["text/plain"].startswith("run 1 has")


@pytest.mark.parametrize(("reply", "left"), [("y", [2]), ("", [1, 2, 3])])
def test_forgetting_asks_first_and_leaves_what_is_pinned(
    shell: InteractiveShell, capsys: Capture, monkeypatch: pytest.MonkeyPatch, reply: str, left: list[int]
) -> None:
    kept({}, {}, {}).change(2, pinned=True)
    questions: list[str] = []

    def answer(question: str) -> str:
        questions.append(question)
        return reply

    monkeypatch.setattr("builtins.input", answer)
    shown = said(shell, "%runs clear", capsys)
    assert questions == ["forget all runs that are not pinned, of all notebooks? [y/N] "]
    assert [row["run"] for row in rows()] == left
    assert ("2 runs forgotten" in shown) is (reply == "y")


def test_forgetting_old_runs_needs_no_question_where_the_line_says_yes(
    shell: InteractiveShell, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(question: str) -> str:
        raise StdinNotImplementedError(question)

    monkeypatch.setattr("builtins.input", refuse)
    kept({"time": time.time() - 40 * 86400}, {"time": time.time() - 20 * 86400})
    with pytest.raises(UsageError, match="cannot ask whether that is meant; --yes says so"):
        shell.run_cell("%runs clear --older-than 30d").raise_error()
    assert "1 run forgotten" in said(shell, "%runs clear --older-than 30d --yes", capsys)
    assert [row["run"] for row in rows()] == [2]


def test_a_run_is_asked_again_as_it_was(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    line = """%%generate --temperature 0.25 --top-p 0.5 --seed 3 --stop END --system S --set 'bad_words=["no"]' --choice a,b"""
    shell.run_cell(line + "\nbraces {x} and {{x}}\n").raise_error()
    # Another notebook's defaults, another engine, a variable of that name: none of them has a say.
    shell.run_cell("%config NBEngine.temperature = 0.9").raise_error()
    shell.run_cell("%config NBEngine.system = 'Other.'").raise_error()
    shell.user_ns["x"] = "a value"
    shell.run_cell("%engine start other --new").raise_error()
    other = backend.clients["other"]
    other.defaults = {"repetition_penalty": 1.5}
    shell.run_cell("%runs rerun 1").raise_error()
    assert other.requests == engine.requests
    shell.run_cell("%runs rerun 1 --temperature 0 --stop STOP --regex [ab]").raise_error()
    prompt, params = other.requests[1]
    assert prompt == engine.requests[0][0]
    assert (params.temperature, params.stop, params.seed, params.top_p) == (0.0, ["STOP"], 3, 0.5)
    assert (params.structured_outputs.regex, params.structured_outputs.choice) == ("[ab]", None)
    shell.run_cell("%runs rerun 1 --system T").raise_error()
    assert other.requests[2][0]["prompt"] == "<system>T<user>braces {x} and {{x}}"
    shell.run_cell("%runs rerun 1 --raw").raise_error()
    assert other.requests[3][0] == "braces {x} and {{x}}"
    assert [row["engine"] for row in rows()] == ["random-tiny", *["other"] * 4]
    assert rows()[1]["settings"] == rows()[0]["settings"]


def test_a_turn_of_a_conversation_is_asked_again_with_all_that_came_before(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    shell.user_ns["look_up"] = look_up
    for line in ("%chat --system S one", "%chat --tools look_up two"):
        shell.run_cell(line).raise_error()
    shell.run_cell("%runs rerun 2").raise_error()
    assert engine.requests[2] == engine.requests[1]
    assert engine.tools[-1] == engine.tools[-2]
    assert engine.tools[-1]
    shell.run_cell("%runs rerun 2 --system T").raise_error()
    assert engine.requests[3][0]["prompt"] == engine.requests[1][0]["prompt"].replace(
        "<system>S", "<system>T"
    )


async def test_a_run_asked_again_streams_into_the_cell_and_shows_what_differs(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    (await run(kernel_shell, "%generate --temperature 0 hi")).raise_error()
    engine.words = ["Hello", " you"]
    (await run(kernel_shell, "again = %runs rerun 1 --diff")).raise_error()
    assert kernel_shell.user_ns["again"].text == "Hello you"
    assert any("Hello [-world-]{+you+}" in each["text/plain"] for each in publisher(kernel_shell).outputs())
    (await run(kernel_shell, "%runs rerun 1 --temperature 0,0.7 -o both")).raise_error()
    both = kernel_shell.user_ns["both"]
    assert [each.previous.text for each in both] == ["Hello world"] * 2
    assert [row["temperature"] for row in both.rows()] == [0.0, 0.7]
    engine.words = None
    (await run(kernel_shell, "%runs rerun 1 -a -o handle")).raise_error()
    engine.emit("late", "stop")
    await until(lambda: kernel_shell.user_ns["handle"].done)
    assert kernel_shell.user_ns["handle"].text == "late"


def test_json_is_asked_for_and_shown_as_json_again(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = ['{"a":', " 1}"]
    said(shell, "%%generate --json -o first\nhi\n", capsys)
    assert '"a": 1' in said(shell, "%runs show 1", capsys)
    said(shell, "%runs rerun 1 -o again", capsys)
    assert shell.user_ns["again"].value == {"a": 1}


def test_runs_of_two_notebooks_are_one_list(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    kept({"prompt": "elsewhere", "notebook": "/other.ipynb"})
    said(shell, "%generate here", capsys)
    assert [row["prompt"] for row in rows()] == ["elsewhere", "here"]
