"""`%%prompt` keeps prompts, `%generate @NAME` asks with them, and `%prompts` lists, compares and deletes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import nbengine
from nbengine.errors import NBEngineError
from nbengine.frontend.runs.place import store_path
from nbengine.magics.comparison.result import ComparisonResult
from nbengine.magics.extension import Extension
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kept_answers import Capture, said
from tests.unit.magics.kernel_cells import run

CAPITAL = "%%prompt capital\nWhat is the capital of {country}?\n"
ROWS = [{"country": "France", "capital": "Paris"}, {"country": "Peru", "capital": "Lima"}]


def fails(shell: InteractiveShell, cell: str) -> str:
    """Run a cell that cannot be carried out, and return the complaint."""
    with pytest.raises((UsageError, NBEngineError)) as caught:
        shell.run_cell(cell).raise_error()
    return str(caught.value)


def last_run() -> dict[str, Any]:
    return nbengine.runs().rows()[-1]


def asked(*, since: int = 0) -> list[str]:
    """List the last messages of the kept runs."""
    return [row["prompt"] for row in nbengine.runs().rows()[since:]]


def test_a_prompt_is_asked_with_values(shell: InteractiveShell, engine: FakeClient, capsys: Capture) -> None:
    assert "prompt capital:1 with country is kept; %generate @capital country=…" in said(
        shell, CAPITAL, capsys
    )
    shell.run_cell('%generate @capital country="New Zealand" --temperature 0.25').raise_error()
    row = last_run()
    assert (row["prompt"], row["temperature"]) == ("What is the capital of New Zealand?", 0.25)
    assert (row["prompt_name"], row["prompt_version"], row["prompt_values"]) == (
        "capital",
        1,
        {"country": "New Zealand"},
    )
    assert row["messages"] == [{"role": "user", "content": row["prompt"]}]
    shell.run_cell("answer = %generate --max-tokens 5 --system Short. @capital:1 country=Peru").raise_error()
    assert shell.user_ns["answer"].text == "Hello world"
    assert last_run()["messages"][0] == {"role": "system", "content": "Short."}


async def test_a_kernels_cell_awaits_it_and_keeps_every_blank(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.run_cell("%%prompt code\n>>> {line}  \n  why?\n").raise_error()
    assert nbengine.prompts()["code"].source == ">>> {line}  \n  why?"
    (await run(kernel_shell, "%generate @code line=x")).raise_error()
    assert asked() == [">>> x  \n  why?"]
    (await run(kernel_shell, "%generate @code line=why?")).raise_error()
    assert asked()[-1] == ">>> why?  \n  why?"


def test_versions_stay_and_can_be_asked_for(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    for body, version in (("one {x}", 1), ("two {x}", 2), ("two {x}", 2), ("one {x}", 1), ("three {x}", 3)):
        assert f"prompt a:{version} " in said(shell, f"%%prompt a\n{body}\n", capsys)
    shell.run_cell("%generate @a:2 x=1\n%generate @a x=1").raise_error()
    assert asked() == ["two 1", "three 1"]
    assert [run["prompt"] for run in nbengine.runs(prompt_name="a", prompt_version=2)] == ["two 1"]
    assert "two 1" in said(shell, "%runs --prompt a:2", capsys)
    assert "three 1" not in said(shell, "%runs --prompt @a:2", capsys)
    assert "prompt @a:3 with x 1" not in said(shell, "%runs show 1", capsys)
    assert 'prompt @a:3 with x "1"' in said(shell, "%runs show 2", capsys)
    assert "a version that is kept: a has 1, 2, 3" in fails(shell, "%generate @a:4 x=1")


def test_roles_examples_and_defaults_become_messages(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.user_ns["reviews"] = [{"text": "I love {it}", "label": "good"}, {"text": "Never", "label": "bad"}]
    shell.run_cell(
        "%%prompt mood --examples reviews --answer label --default tone=Short\n"
        "system:\n{tone}.\nuser:\nReview: {text}\n"
    ).raise_error()
    shell.user_ns["reviews"].clear()
    shell.run_cell("%generate @mood text=Fine").raise_error()
    expected = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "Review: I love {it}"},
        {"role": "assistant", "content": "good"},
        {"role": "user", "content": "Review: Never"},
        {"role": "assistant", "content": "bad"},
        {"role": "user", "content": "Review: Fine"},
    ]
    assert last_run()["messages"] == expected
    assert last_run()["prompt"] == "Review: Fine"
    shell.run_cell("%generate --system Other @mood text=Fine tone=x").raise_error()
    assert last_run()["messages"] == [{"role": "system", "content": "Other"}, *expected[1:]]
    shell.run_cell("%config NBEngine.system = 'Of the notebook'").raise_error()
    shell.run_cell("%generate @mood text=Fine").raise_error()
    assert last_run()["messages"] == expected


def test_examples_must_have_what_the_prompt_asks_for(shell: InteractiveShell) -> None:
    shell.user_ns["reviews"] = [{"text": "a", "answer": "b"}, {"text": "a"}]
    cell = "%%prompt mood {}\nReview: {{text}}\n"
    assert "row 2 has no 'answer', which --answer names" in fails(shell, cell.format("--examples reviews"))
    shell.user_ns["reviews"] = [{"txt": "a", "answer": "b"}]
    assert "row 1 has no 'text' for {text}" in fails(shell, cell.format("--examples reviews"))
    assert "--examples nothing: no variable 'nothing'" in fails(shell, cell.format("--examples nothing"))
    assert "--answer names the answer of --examples" in fails(shell, cell.format("--answer x"))
    assert len(nbengine.prompts()) == 0


def test_a_model_without_a_chat_template_gets_one_text(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.has_chat_template = False
    shell.user_ns["shots"] = [{"x": "1", "answer": "2"}]
    shell.run_cell("%%prompt next --examples shots\n{x} then\n").raise_error()
    shell.run_cell("%generate @next x=5").raise_error()
    assert engine.requests[-1][0] == "1 then 2\n\n5 then"
    assert last_run()["prompt"] == "1 then 2\n\n5 then"
    shell.run_cell("%%prompt talk\nuser:\n{x}\n").raise_error()
    assert "@talk: the prompt has roles, which only a chat template can say" in fails(
        shell, "%generate @talk x=5"
    )


def test_values_come_from_the_nearest_place(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%%prompt p --default b=default\n{a} {b}\n").raise_error()
    shell.user_ns |= {"a": "notebook", "b": "notebook", "c": "an inner"}
    shell.run_cell("%generate @p").raise_error()
    shell.run_cell("%generate @p a={c} b=line").raise_error()
    assert asked() == ["notebook default", "an inner line"]
    shell.user_ns["rows"] = [{"a": "field", "b": "field"}]
    shell.run_cell("%generate @p --each rows").raise_error()
    shell.run_cell("%generate @p b=line --each rows").raise_error()
    shell.run_cell("%generate @p --each a=1,2").raise_error()
    assert asked(since=2) == ["field field", "field line", "1 default", "2 default"]


def test_the_body_is_the_value_of_what_has_none(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell(
        "%%prompt sum --default style=short\nSum up in {words} words, {style}:\n{text}\n"
    ).raise_error()
    shell.run_cell("%%generate @sum words=5\na long text\nof {two} lines\n").raise_error()
    assert asked() == ["Sum up in 5 words, short:\na long text\nof {two} lines"]
    assert "and words, text have none" in fails(shell, "%%generate @sum\na long text\n")
    assert "and all have one" in fails(shell, "%%generate @sum words=5 text=x\na long text\n")


def test_each_goes_over_its_variables_and_over_rows(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell(CAPITAL).raise_error()
    shell.run_cell("%generate @capital --each country=France,Peru --temperature 0.1,0.7").raise_error()
    questions = [f"What is the capital of {country}?" for country in ("France", "Peru")]
    assert asked() == [questions[0]] * 2 + [questions[1]] * 2
    shell.user_ns["rows"] = ROWS
    shell.run_cell("tried = %generate @capital --each rows --expect capital -o tried").raise_error()
    tried = shell.user_ns["tried"]
    assert isinstance(tried, ComparisonResult)
    assert asked(since=4) == questions
    assert [row["capital_matches"] for row in tried.rows()] == [False, False]
    rows = nbengine.runs().rows()[4:]
    assert [(row["prompt_name"], row["prompt_values"], row["varied"]) for row in rows] == [
        ("capital", {"country": "France"}, {"rows": 0}),
        ("capital", {"country": "Peru"}, {"rows": 1}),
    ]
    shell.run_cell('%%prompt of\nOf {row["country"]}\n').raise_error()
    shell.run_cell("%generate @of --each row=rows").raise_error()
    assert asked(since=6) == ["Of France", "Of Peru"]


def test_a_judge_is_asked_the_rule_and_not_the_prompts_messages(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    shell.run_cell("%%prompt a\nsystem:\nBe good.\nuser:\nSay {x}\n").raise_error()
    engine.turns = [["one"], ["two"], ["4"], ["5"]]
    shell.run_cell('%generate @a --each x=1,2 --judge "Is it right?" -o tried').raise_error()
    assert [row["judge"] for row in shell.user_ns["tried"].rows()] == [4, 5]
    judged = str(engine.requests[2][0])
    assert "Is it right?" in judged
    assert "Be good." not in judged


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("@capital", "complete: country has none (country=…)"),
        ("@capital cuntry=Peru", "(country; did you mean country?), got 'cuntry'"),
        ("@capital country=Peru country=Chile", "country=… stands there twice; --each country=a,b"),
        ("@capital country=Peru --each country=a,b", "country has two values: country=… and --each country"),
        ("@capital Peru", "unexpected 'Peru': behind @NAME stand values (country=Peru) and flags"),
        ("@capital country=Peru --each city=a,b", "--each: neither the prompt nor a flag names {city}"),
        ("@capitol country=Peru", "`%prompts` lists them; did you mean capital?"),
        ("@capitol country=Peru", "a text that begins with @ stands behind --"),
        ("@capital:x country=Peru", "NAME or NAME:VERSION"),
        ("@capital country=Peru --temprature 0", "unknown flag --temprature"),
    ],
)
def test_a_mistake_is_one_clear_line(
    shell: InteractiveShell, engine: FakeClient, line: str, complaint: str
) -> None:
    shell.run_cell(CAPITAL).raise_error()
    assert complaint in fails(shell, f"%generate {line}")
    assert engine.requests == []


def test_a_text_may_begin_with_an_at_sign(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%generate -- @alice said hello").raise_error()
    shell.run_cell("%%generate\n@alice said hello\n").raise_error()
    shell.run_cell("%generate @ noon").raise_error()
    assert asked() == ["@alice said hello", "@alice said hello", "@ noon"]


def test_a_rerun_is_a_run_of_the_same_prompt(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%%prompt a\nsystem:\nBe good.\nuser:\nSay {x}\n").raise_error()
    shell.run_cell("%generate @a x=1").raise_error()
    shell.run_cell("%%prompt a\nsystem:\nBe bad.\nuser:\nSay {x}\n").raise_error()
    shell.run_cell("%runs rerun 1 --temperature 0.9").raise_error()
    first, again = nbengine.runs().rows()
    same = ("messages", "prompt", "prompt_name", "prompt_version", "prompt_values")
    assert [again[name] for name in same] == [first[name] for name in same]
    shell.run_cell("%runs rerun 1 --system Other").raise_error()
    assert last_run()["prompt_name"] == ""


def test_the_list_has_what_each_prompt_is_for(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    assert "no prompt has been kept yet" in said(shell, "%prompts", capsys)
    shell.run_cell(CAPITAL).raise_error()
    shell.run_cell("%%prompt talk --default y=1\nsystem:\nHi\nuser:\nSay {x} <b>{y}</b>\n").raise_error()
    shell.run_cell(CAPITAL.replace("What is", "Name")).raise_error()
    shell.run_cell("%generate @capital country=Peru").raise_error()
    shown = said(shell, "%prompts", capsys)
    lines = [line.split() for line in shown.splitlines()]
    assert [line[:2] for line in lines[1:]] == [["capital", "2"], ["talk", "1"]]
    assert "Say {x} <b>{y}</b>" in shown
    assert "1 (older)" in said(shell, "%prompts --versions", capsys)
    about = said(shell, "%prompts show talk -o talk", capsys)
    assert "variables: x, y (default '1') · %generate @talk x=…" in about
    assert "> user:\n> Say {x} <b>{y}</b>" in about
    assert shell.user_ns["talk"].messages(x="1")[1]["content"] == "Say 1 <b>1</b>"
    assert "1 run, the last" in said(shell, "%prompts show capital", capsys)
    assert "0 runs" in said(shell, "%prompts show capital:1", capsys)


def test_versions_are_compared(shell: InteractiveShell, capsys: Capture) -> None:
    shell.run_cell(CAPITAL).raise_error()
    assert "capital:1 is the earliest version" in fails(shell, "%prompts diff capital")
    shell.run_cell("%%prompt capital --default country=Peru\nName the capital of {country}.\n").raise_error()
    shown = said(shell, "%prompts diff capital", capsys)
    assert "capital:1 → capital:2" in shown
    assert "[-What is-]" in shown
    assert "{+" in shown
    assert "country=Peru" in shown
    assert "capital:2 → capital:1" in said(shell, "%prompts diff capital:2 capital:1", capsys)


def test_deleting_asks_first(
    shell: InteractiveShell, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.run_cell(CAPITAL).raise_error()
    shell.run_cell(CAPITAL.replace("What is", "Name")).raise_error()
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert "nothing is forgotten" in said(shell, "%prompts delete capital", capsys)
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert "1 version of prompt capital forgotten" in said(shell, "%prompts delete capital:2", capsys)
    assert nbengine.prompts()["capital"].version == 1
    assert "1 version of prompt capital forgotten" in said(shell, "%prompts delete capital --yes", capsys)
    assert "none is kept yet" in fails(shell, "%prompts delete capital --yes")


def test_prompts_travel_in_files(shell: InteractiveShell, capsys: Capture, tmp_path: Path) -> None:
    shell.user_ns["shots"] = [{"x": "1", "answer": "é"}]
    shell.run_cell("%%prompt next --examples shots --default x=9\n{x} then\n").raise_error()
    shell.run_cell(CAPITAL).raise_error()
    file = tmp_path / "prompts.json"
    before = [(prompt.name, prompt.digest) for prompt in nbengine.prompts()]
    assert "2 prompts written" in said(shell, f"%prompts export {file}", capsys)
    assert "must be a new one; --force replaces it" in fails(shell, f"%prompts export {file} next")
    said(shell, "%prompts delete next --yes\n%prompts delete capital --yes", capsys)
    assert "2 prompts kept: capital:1, next:1" in said(shell, f"%prompts import {file}", capsys)
    assert [(prompt.name, prompt.digest) for prompt in nbengine.prompts()] == before
    said(shell, f"%prompts export {file} next --force", capsys)
    assert [each["name"] for each in json.loads(file.read_text())["prompts"]] == ["next"]
    for text, complaint in (
        ("[]", "what %prompts export writes"),
        ('{"nbengine_prompts": 2, "prompts": []}', "in format 1, not 2"),
        (
            '{"nbengine_prompts": 1, "prompts": [{"name": "x y", "text": "t"}]}',
            "the name of a prompt must be",
        ),
    ):
        file.write_text(text)
        assert complaint in fails(shell, f"%prompts import {file}")
    assert "cannot be read" in fails(shell, f"%prompts import {tmp_path / 'none.json'}")


def test_while_nothing_is_kept_a_prompt_lives_in_the_kernel_alone(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%config NBEngine.keep_runs = False").raise_error()
    for body, version in (("one {x}", 1), ("two {x}", 2), ("one {x}", 1)):
        shown = said(shell, f"%%prompt a\n{body}\n", capsys)
        assert f"prompt a:{version} with x is kept (in this kernel alone: NBEngine.keep_runs is off)" in shown
    shell.run_cell("one = %generate @a x=1\ntwo = %generate @a:2 x=1").raise_error()
    assert (shell.user_ns["one"].prompt, shell.user_ns["two"].prompt) == ("one 1", "two 1")
    assert "in this kernel alone" in said(shell, "%prompts", capsys)
    assert not store_path().exists()
    shell.run_cell("%config NBEngine.keep_runs = True").raise_error()
    assert "prompt a:1 with x is kept; " in said(shell, "%%prompt a\nthree {x}\n", capsys)
    assert nbengine.prompts()["a"].source == "three {x}"
    shell.run_cell("%config NBEngine.keep_runs = False").raise_error()
    before = store_path().read_bytes()
    assert "prompt a:2 with x is kept (in this kernel" in said(shell, "%%prompt a\nfour {x}\n", capsys)
    assert "prompt a:1 with x is kept (in this kernel" in said(shell, "%%prompt a\nthree {x}\n", capsys)
    assert store_path().read_bytes() == before
    assert "2 versions of prompt a" not in said(shell, "%prompts delete a:2 --yes", capsys)
    said(shell, "%generate @a x=5", capsys)


def test_while_the_store_cannot_be_written_a_prompt_lives_in_the_kernel_alone(
    shell: InteractiveShell,
    engine: FakeClient,
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "no directory"
    place.write_text("")
    monkeypatch.setenv("NBENGINE_RUNS_DIR", str(place))
    shown = said(shell, CAPITAL, capsys)
    assert "in this kernel alone: the prompts in" in shown
    assert "NBENGINE_RUNS_DIR chooses another directory" in shown
    shell.run_cell("answer = %generate @capital country=Peru").raise_error()
    assert shell.user_ns["answer"].prompt == "What is the capital of Peru?"


def test_names_commands_and_variables_are_completed(shell: InteractiveShell) -> None:
    shell.run_cell(CAPITAL).raise_error()
    shell.run_cell("%%prompt cap2\n{one} {two}\n").raise_error()
    complete = Extension.loaded[shell].completion.complete
    assert complete("%generate @ca") == ("@ca", ["@cap2", "@capital"])
    assert complete("%generate --temperature 0 @capi") == ("@capi", ["@capital"])
    assert complete("%%generate @capi") == ("@capi", ["@capital"])
    assert complete("%generate @cap2 ") == ("", ["one=", "two="])
    assert complete("%generate @cap2 one=1 t") == ("t", ["two="])
    assert "--temperature" in complete("%generate @cap2 one=1 --temp")[1]
    assert complete("%prompts sh") == ("sh", ["show"])
    assert complete("%prompts show cap") == ("cap", ["cap2", "capital"])
    assert complete("%prompts diff capital cap2")[1] == ["cap2"]
    assert complete("%runs --prompt capi") == ("capi", ["capital"])
    assert complete("%%prompt capi") == ("capi", ["capital"])
    assert "--examples" in complete("%%prompt capital --ex")[1]


def test_help_and_wrong_lines(shell: InteractiveShell, capsys: Capture) -> None:
    assert "Keep the cell's body as a prompt" in said(shell, "%%prompt -h\nx\n", capsys)
    assert "%prompts diff capital" in said(shell, "%prompts -h", capsys)
    assert "must exist" not in said(shell, "%prompts export -h", capsys)
    assert "did you mean show?" in fails(shell, "%prompts shwo a")
    assert "the name of a prompt must be" in fails(shell, "%%prompt 1a\nx\n")
    assert "the prompt is the cell's body" in fails(shell, "%%prompt a b\nx\n")
    assert "is not of the form NAME=VALUE" in fails(shell, "%%prompt a --default x\n{x}\n")
    assert "must be of one of its variables" in fails(shell, "%%prompt a --default y=1\n{x}\n")


def test_a_kept_prompt_is_a_turn_of_a_conversation(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%%prompt support\nsystem:\nYou help {who}.\nuser:\nI am {name}.").raise_error()
    shell.run_cell("%chat Hello").raise_error()
    shell.run_cell("%chat --temperature 0.25 @support name=Ann who=people -o talk").raise_error()
    row = last_run()
    assert (row["prompt"], row["temperature"]) == ("I am Ann.", 0.25)
    assert (row["prompt_name"], row["prompt_version"]) == ("support", 1)
    assert row["messages"] == [
        {"role": "system", "content": "You help people."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello world"},
        {"role": "user", "content": "I am Ann."},
    ]
    assert [turn.user for turn in shell.user_ns["talk"].turns] == ["Hello", "I am Ann."]
    # The body is the value of the variable that has none, and the line's own system message wins.
    shell.run_cell("%%chat --system Short. @support who=you\nBob {left}\n").raise_error()
    assert last_run()["messages"][0]["content"] == "Short."
    assert last_run()["prompt"] == "I am Bob {left}."
    shell.run_cell("%chat -- @support is no prompt here").raise_error()
    assert last_run()["prompt"] == "@support is no prompt here"
    assert "name" in fails(shell, "%chat @support who=you")
    assert "support has 1" in fails(shell, "%chat @support:3 name=x who=y")
    shell.run_cell("rows = [{'a': 1, 'b': 2}]\n").raise_error()
    shell.run_cell("%%prompt shots --examples rows --answer b\n{a}").raise_error()
    assert "a turn is one message" in fails(shell, "%chat @shots a=3")


def test_names_and_values_of_kept_prompts_are_completed_in_conversations(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    shell.run_cell(CAPITAL).raise_error()
    complete = Extension.loaded[shell].completion.complete
    assert complete("%chat @cap") == ("@cap", ["@capital"])
    assert complete("%chat @capital c") == ("c", ["country="])
