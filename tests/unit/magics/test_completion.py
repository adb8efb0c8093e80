"""Tab completion, through the shell's own completer."""

from __future__ import annotations

from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from nbengine.config import EngineArgs
from nbengine.magics.completion import CHOICES, model_names
from nbengine.magics.engines.arguments import start_parser
from nbengine.magics.extension import Extension, unload
from tests.unit.magics.conftest import FakeClient


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    directory = tmp_path / "work"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def completed(shell: InteractiveShell, text: str) -> list[str]:
    """The whole text after each completion, as a frontend makes it."""
    with provisionalcompleter():
        return [
            text[: c.start] + c.text + text[c.end :] for c in shell.Completer.completions(text, len(text))
        ]


def words(shell: InteractiveShell, text: str) -> list[str]:
    """The words that may stand at the cursor."""
    return [whole.split(" ")[-1] for whole in completed(shell, text)]


def test_commands_of_the_engine_are_offered(shell: InteractiveShell) -> None:
    assert words(shell, "%engine st") == ["start", "status", "stop"]
    assert {"load", "fit", "config", "logs", "help"} <= set(words(shell, "%engine "))
    assert words(shell, "%engine help sta") == ["start", "status"]


def test_flags_of_every_command_are_offered(shell: InteractiveShell) -> None:
    assert words(shell, "%engine start --tens") == ["--tensor-parallel-size"]
    assert words(shell, "%engine start smollm2-135m --max-model") == ["--max-model-len"]
    assert words(shell, "%engine logs --") == ["--follow", "--help", "--rank", "--worker"]
    assert set(words(shell, "%engine start --")) == {
        flag for flag in start_parser().flags if flag.startswith("--")
    }


def test_each_command_says_what_it_reads_and_does_nothing(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    magics = Extension.loaded[shell].engine
    for command in magics.command_names:
        parser = magics.parser_of(command)
        assert (parser is None) == (command == "help")
        assert parser is None or parser.prog == f"%engine {command}"
    assert capsys.readouterr().out == ""
    assert not engine.calls
    assert not engine.utilities


@pytest.mark.parametrize("magic", ["%%generate", "%generate", "%%chat", "%chat"])
def test_flags_of_prompts_are_offered(shell: InteractiveShell, magic: str) -> None:
    assert words(shell, f"{magic} --tempe") == ["--temperature"]
    assert words(shell, f"{magic} --temperature 1 --min") == ["--min-p"]
    assert words(shell, f"x = {magic} --tempe" if magic[1] != "%" else f"\n{magic} --tempe") == [
        "--temperature"
    ]
    assert words(shell, f"{magic} -f ") == ["code", "json", "markdown", "text"]
    assert words(shell, f"{magic} --format=ma") == ["--format=markdown"]


def test_a_prompt_and_a_body_are_not_completed_as_flags(shell: InteractiveShell) -> None:
    assert "--temperature" not in words(shell, "%generate tell me --tempe")
    assert "--temperature" not in words(shell, "%generate 'open --tempe")
    assert "--temperature" not in words(shell, "%%generate\nset --tempe")
    assert "--temperature" not in words(shell, "x = 1\n%%generate --tempe")
    assert Extension.loaded[shell].completion.complete("%other --te") == ("", [])


def test_engines_are_offered_by_name(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%engine start random-tiny --name second").raise_error()
    assert words(shell, "%%generate --engine ") == ["random-tiny", "second"]
    assert words(shell, "%%generate --engine random-tiny,se") == ["random-tiny,second"]
    assert words(shell, "%engine stop s") == ["second"]
    shell.run_cell("%engine detach second").raise_error()
    assert "second" not in words(shell, "%engine stop s")
    assert words(shell, "%engine attach s") == ["second"]
    assert words(shell, "%engine load --name r") == ["random-tiny"]


def test_models_are_offered(shell: InteractiveShell, elsewhere: Path, tmp_path: Path) -> None:
    for name in ("tiny.gguf", "notes.txt"):
        (elsewhere / name).touch()
    (elsewhere / "llama").mkdir()
    (elsewhere / "llama" / "config.json").touch()
    (elsewhere / "deep" / "tale").mkdir(parents=True)
    (tmp_path / "hub" / "models--owner--some-model").mkdir(parents=True)
    offered = words(shell, "%engine start ")
    assert {
        "smollm2-135m",
        "random-tiny",
        "random-tiny-moe",
        "tiny.gguf",
        "llama",
        "owner/some-model",
    } <= set(offered)
    assert "notes.txt" not in offered
    assert words(shell, "%engine fit owner/so") == ["owner/some-model"]
    assert words(shell, "%engine start deep/t") == ["deep/tale/"]
    assert words(shell, f"%engine start {elsewhere}/t") == [f"{elsewhere}/tiny.gguf"]
    assert "random-tiny" not in words(shell, "%engine start llama r")
    assert not any(name.startswith("~") for name in model_names("~nobody-here/"))


def test_values_that_are_one_of_a_few(shell: InteractiveShell) -> None:
    assert words(shell, "%engine start --dtype b") == ["bfloat16"]
    assert words(shell, "%engine start --device=c") == ["--device=cpu", "--device=cuda"]
    assert words(shell, "%engine start --dp-backend ") == ["mp", "ray"]
    assert words(shell, "%engine sleep --level ") == ["1", "2"]
    assert set(CHOICES) <= set(EngineArgs.__dataclass_fields__)


def test_engines_and_flags_of_the_dashboard_are_offered(shell: InteractiveShell, engine: FakeClient) -> None:
    assert words(shell, "%dashboard ra") == ["random-tiny"]
    assert words(shell, "%dashboard random-tiny --pl") == ["--plain"]


def test_conversations_and_variables_are_offered(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%chat --name alpha hi").raise_error()
    shell.user_ns.update(schema={"type": "object"}, scores=[1, 2], number=3, _hidden={})
    assert words(shell, "%chat --name a") == ["alpha"]
    assert words(shell, "%%generate --json s") == ["schema"]
    assert words(shell, "%%generate --json --tempe") == ["--temperature"]


def test_unloading_ends_it(shell: InteractiveShell) -> None:
    before = len(shell.Completer.custom_matchers)
    unload(shell)
    assert len(shell.Completer.custom_matchers) == before - 1
    assert "--temperature" not in words(shell, "%%generate --tempe")


@pytest.mark.parametrize(
    "text",
    [
        "%%generate\nTell {sto",
        "%%generate -o x\n\nOnce.\nTell {sto",
        "%%chat\n{sto",
        "%generate Tell {sto",
        "x = %generate Tell {sto",
        "%%generate --system {sto",
        "%engine start {sto",
        "%%generate\n{{{sto",
    ],
)
def test_a_brace_in_a_prompt_offers_the_variables_that_can_stand_there(
    shell: InteractiveShell, text: str
) -> None:
    shell.user_ns.update(story="Once", stone=3, stop=print, Stock=dict, _stored=1, other="x")
    assert completed(shell, text) == [text.removesuffix("sto") + name for name in ("stone", "story")]


def test_a_brace_offers_the_attributes_of_a_variable_and_reads_none_of_them(shell: InteractiveShell) -> None:
    class Trap:
        text = "bait"

        @property
        def tail(self) -> str:
            raise AssertionError("completion has read a property")

    shell.user_ns["trap"] = Trap()
    assert completed(shell, "%%generate\n{trap.t") == ["%%generate\n{trap.tail", "%%generate\n{trap.text"]
    assert Extension.loaded[shell].completion.complete("%%generate\n{nobody.t") == ("t", [])


@pytest.mark.parametrize(
    "text",
    [
        "%%generate\n{{sto",
        "%%generate\n{story} sto",
        "%%generate\n{story}.sto",
        "%%other\n{sto",
        "x = f'{sto",
    ],
)
def test_outside_of_a_field_no_variable_is_offered(shell: InteractiveShell, text: str) -> None:
    shell.user_ns["story"] = "Once"
    assert Extension.loaded[shell].completion.complete(text) == ("", [])


def test_tools_offers_the_functions(shell: InteractiveShell) -> None:
    shell.run_cell("def weather(): ...\ndef wind(): ...\nwords = ['a']")
    assert completed(shell, "%%chat --tools w") == ["%%chat --tools weather", "%%chat --tools wind"]
    assert completed(shell, "%chat --tools weather,wi") == ["%chat --tools weather,wind"]


def test_each_offers_the_variables_with_several_values(shell: InteractiveShell) -> None:
    shell.user_ns.update(questions=["a", "b"], quests={"x": 1}, question="a", number=3)
    for line in (
        "%%generate --each ",
        "%%generate --each qu",
        "%generate --each item=",
        "%%generate --each item=qu",
    ):
        lead = line.removesuffix("qu")
        assert completed(shell, line) == [f"{lead}questions", f"{lead}quests"], line
    assert completed(shell, "%%generate --each=ques") == [
        "%%generate --each=questions",
        "%%generate --each=quests",
    ]


def test_commands_and_flags_of_runs_are_offered(shell: InteractiveShell, engine: FakeClient) -> None:
    assert words(shell, "%runs ") == ["clear", "diff", "note", "pin", "rerun", "show"]
    assert words(shell, "%runs re") == ["rerun"]
    assert words(shell, "%runs --fi") == ["--find"]
    assert words(shell, "%runs --last 3 --pi") == ["--pinned"]
    assert words(shell, "%runs --engine ") == ["random-tiny"]
    assert words(shell, "%runs rerun 12 --temp") == ["--temperature", "--template"]
    assert words(shell, "%runs show 12 -f m") == ["markdown"]
    assert words(shell, "%runs clear --y") == ["--yes"]
    assert "--find" not in words(shell, "%runs nothing --")
    shell.user_ns["my_word"] = "bread"
    assert words(shell, "%runs --find {my_w") == ["{my_word"]
