"""`%chat` and `%%chat`: the turns of a conversation, when cells run again, and when it is undone, named or saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import NBEngineError
from nbengine.magics.conversations.conversation import Conversation
from tests.unit.magics.chat_cells import prompts, run
from tests.unit.magics.conftest import FakeClient

Capture = pytest.CaptureFixture[str]


def test_a_cell_that_runs_again_replaces_its_turn_and_all_after_it(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    for number, cell in enumerate("abc"):
        run(shell, f"%%chat\nsaid in {cell}\n", cell, str(number))
    capsys.readouterr()
    run(shell, "%%chat\nedited\n", "b", "4")
    assert "1 later turn dropped" in capsys.readouterr().out
    talk = shell.user_ns["_"]
    assert [turn.user for turn in talk.turns] == ["said in a", "edited"]
    assert prompts(engine)[-1] == "<user>said in a<assistant>Hello world<user>edited"
    run(shell, "%%chat --append\nedited\n", "b", "5")
    run(shell, "%%chat\nno cell\n")
    assert [turn.user for turn in talk.turns] == ["said in a", "edited", "edited", "no cell"]


def test_one_run_of_a_cell_may_say_several_things(shell: InteractiveShell, engine: FakeClient) -> None:
    for execution in ("1", "2"):
        run(
            shell,
            "for word in ('one', 'two'):\n    get_ipython().run_line_magic('chat', '-o talk ' + word)",
            "a",
            execution,
        )
        assert [turn.user for turn in shell.user_ns["talk"].turns] == ["one", "two"]


def test_running_all_cells_again_makes_the_same_conversation(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    for execution in ("1", "2"):
        run(shell, "%%chat --reset\nbegin\n", "a", execution)
        run(shell, "%%chat\nwrong\n", "b", execution)
        run(shell, "%%chat --undo\nbetter\n", "c", execution)
        run(shell, "%%chat\nend\n", "d", execution)
        assert [turn.user for turn in shell.user_ns["_"].turns] == ["begin", "better", "end"]


def test_a_cell_that_undoes_does_so_once(shell: InteractiveShell, engine: FakeClient) -> None:
    run(shell, "%%chat\nkeep\n", "a", "1")
    run(shell, "%%chat\nwrong\n", "b", "2")
    for execution in ("3", "4"):
        run(shell, "%%chat --undo\nbetter\n", "c", execution)
        assert [turn.user for turn in shell.user_ns["_"].turns] == ["keep", "better"]


def test_turns_can_be_undone_shown_and_reset(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    run(shell, "%chat --system brief one")
    run(shell, "%chat two")
    run(shell, "%chat three")
    capsys.readouterr()
    run(shell, "%chat --undo 2")
    assert capsys.readouterr().out == "forgot 2 turns of conversation 'default'; 1 turn left\n"
    run(shell, "%chat --show")
    assert capsys.readouterr().out == "system: brief\n\n1. user: one\n\n1. assistant: Hello world\n"
    with pytest.raises(
        UsageError, match="undo must be from 1 to 1, the turns of conversation 'default', got 2"
    ):
        run(shell, "%chat --undo 2")
    with pytest.raises(UsageError, match="undo must be from 1 to 1"):
        run(shell, "%chat --undo 0 again")
    run(shell, "%chat --reset")
    assert capsys.readouterr().out == "conversation 'default' is empty now; 1 turn forgotten\n"
    run(shell, "%chat --show")
    assert capsys.readouterr().out == "conversation 'default' is empty\n"
    run(shell, "%chat four")
    assert prompts(engine)[-1] == "<user>four"


def test_a_system_message_holds_from_then_on_and_the_notebooks_own_stands_in(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    shell.run_line_magic("config", "NBEngine.system = 'from config'")
    run(shell, "%chat a")
    run(shell, "%chat --system 'from here'")
    run(shell, "%chat --undo 1 b")
    run(shell, "%chat --undo 1 --system '' c")
    assert prompts(engine) == ["<system>from config<user>a", "<system>from here<user>b", "<user>c"]


def test_conversations_have_names(shell: InteractiveShell, engine: FakeClient) -> None:
    run(shell, "%chat --name first -o first one")
    run(shell, "%chat --name second -o second two")
    assert prompts(engine) == ["<user>one", "<user>two"]
    assert [turn.user for turn in shell.user_ns["first"].turns] == ["one"]
    with pytest.raises(UsageError, match="'first', 'second'; did you mean second"):
        run(shell, "%chat --name secnd --show")


def test_a_conversation_outlives_its_engine_and_changes_to_another(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    run(shell, "%chat one")
    run(shell, "%engine restart")
    run(shell, "%engine start random-tiny --name other")
    run(shell, "%chat --engine other two")
    assert [turn.user for turn in shell.user_ns["_"].turns] == ["one", "two"]


def test_a_conversation_is_saved_and_goes_on(
    shell: InteractiveShell, engine: FakeClient, tmp_path: Path, capsys: Capture
) -> None:
    engine.words = ["<think>hm</think>", "Tschüß"]
    file = tmp_path / "talk.json"
    run(shell, f"%%chat --system s --save {file}\nHällo\n", "a", "1")
    assert json.loads(file.read_text())["turns"][0]["user"] == "Hällo"
    run(shell, "%chat --reset")
    capsys.readouterr()
    run(shell, f"%chat --load {file}")
    assert capsys.readouterr().out == "conversation 'default' goes on after 1 turn\n"
    run(shell, "%%chat -o talk\nHello\n", "a", "2")
    assert prompts(engine)[-1] == "<system>s<user>Hello"
    talk = shell.user_ns["talk"]
    again = Conversation.from_dict(talk.to_dict())
    assert (again.turns, again.system, again.name) == (talk.turns, "s", "default")
    assert (again.reasoning, again.text) == ("hm", "Tschüß")


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"format": "other"}', '{"format": "nbengine-conversation", "version": 1}']
)
def test_a_file_that_is_no_conversation_is_refused(
    shell: InteractiveShell, engine: FakeClient, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    with pytest.raises(NBEngineError, match="conversation"):
        run(shell, f"%chat --load {file}")
    with pytest.raises(NBEngineError, match="cannot read"):
        run(shell, f"%chat --load {file}.missing")
