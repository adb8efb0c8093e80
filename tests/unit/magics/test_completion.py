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


def test_commands_of_the_engine(shell: InteractiveShell) -> None:
    assert words(shell, "%engine st") == ["start", "status", "stop"]
    assert {"load", "fit", "config", "logs", "help"} <= set(words(shell, "%engine "))
    assert words(shell, "%engine help sta") == ["start", "status"]


def test_flags_of_every_command(shell: InteractiveShell) -> None:
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
def test_flags_of_prompts(shell: InteractiveShell, magic: str) -> None:
    assert words(shell, f"{magic} --temp") == ["--temperature"]
    assert words(shell, f"{magic} --temperature 1 --min") == ["--min-p"]
    assert words(shell, f"x = {magic} --temp" if magic[1] != "%" else f"\n{magic} --temp") == [
        "--temperature"
    ]
    assert words(shell, f"{magic} -f ") == ["code", "json", "markdown", "text"]
    assert words(shell, f"{magic} --format=ma") == ["--format=markdown"]


def test_a_prompt_and_a_body_are_not_completed_as_flags(shell: InteractiveShell) -> None:
    assert "--temperature" not in words(shell, "%generate tell me --temp")
    assert "--temperature" not in words(shell, "%generate 'open --temp")
    assert "--temperature" not in words(shell, "%%generate\nset --temp")
    assert "--temperature" not in words(shell, "x = 1\n%%generate --temp")
    assert Extension.loaded[shell].completion.complete("%other --te") == ("", [])


def test_engines_by_name(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%engine start random-tiny --name second").raise_error()
    assert words(shell, "%%generate --engine ") == ["random-tiny", "second"]
    assert words(shell, "%%generate --engine random-tiny,se") == ["random-tiny,second"]
    assert words(shell, "%engine stop s") == ["second"]
    shell.run_cell("%engine detach second").raise_error()
    assert "second" not in words(shell, "%engine stop s")
    assert words(shell, "%engine attach s") == ["second"]
    assert words(shell, "%engine load --name r") == ["random-tiny"]


def test_models(shell: InteractiveShell, elsewhere: Path, tmp_path: Path) -> None:
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


def test_the_dashboards_line(shell: InteractiveShell, engine: FakeClient) -> None:
    assert words(shell, "%dashboard ra") == ["random-tiny"]
    assert words(shell, "%dashboard random-tiny --pl") == ["--plain"]


def test_conversations_and_variables(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%chat --name alpha hi").raise_error()
    shell.user_ns.update(schema={"type": "object"}, scores=[1, 2], number=3, _hidden={})
    assert words(shell, "%chat --name a") == ["alpha"]
    assert words(shell, "%%generate --json s") == ["schema"]
    assert words(shell, "%%generate --json --temp") == ["--temperature"]


def test_unloading_ends_it(shell: InteractiveShell) -> None:
    before = len(shell.Completer.custom_matchers)
    unload(shell)
    assert len(shell.Completer.custom_matchers) == before - 1
    assert "--temperature" not in words(shell, "%%generate --temp")
