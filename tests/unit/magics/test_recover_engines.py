"""`%engine recover`: engines that are not attached, do not answer, have died or lost what they had."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, UtilityError
from nbengine.runtime.connection import write_connection
from tests.unit.magics.conftest import FakeBackend, FakeClient
from tests.unit.magics.kept_answers import kept, said

Capture = pytest.CaptureFixture[str]


def test_nothing_to_recover_says_where_there_might_be_something(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    assert "no engine runs, and what an engine has kept is gone with it" in said(
        shell, "%engine recover", capsys
    )
    said(shell, "%engine start random-tiny --name one", capsys)
    client = backend.clients["one"]
    client.unread_sessions = {"kernel-7": 2, "kernel-8": 0}
    answer = said(shell, "%engine recover -l", capsys)
    assert "no answer of this notebook is kept" in answer
    assert "engine 'one' has 2 answers that nobody has read: %engine recover --session kernel-7" in answer
    assert "kernel-8" not in answer
    client.kept["kernel-7"] = [kept("5-x", "from elsewhere")]
    assert "from elsewhere" in said(shell, "%engine recover --session kernel-7", capsys)
    assert client.read == [("kernel-7", ["5-x"])]
    assert (
        said(shell, "%engine recover --session other", capsys) == "nothing has been kept of session 'other'\n"
    )
    said(shell, "%engine detach", capsys)
    assert "`%engine attach`: one" in said(shell, "%engine recover", capsys)


def test_a_restarted_kernel_joins_its_engine_by_itself(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    engine.kept[None] = [kept("9-a", "from before")]
    # What a killed kernel leaves: the mark in the engine's directory, and nothing else.
    shell.magics_manager.registry["EngineMagics"]._session._engines.clear()
    answer = said(shell, "%engine recover", capsys)
    assert backend.attached == ["random-tiny"]
    assert "from before" in answer


def test_an_engine_that_cannot_be_asked_is_named_and_the_kernels_own_answers_are_shown(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%generate here", capsys)
    for error, reason in (
        (UtilityError("engine core 1 has ended"), "core 1 has ended"),
        (TimeoutError(), "no answer"),
    ):
        engine.answers["transcripts"] = error
        answer = said(shell, "%engine recover", capsys)
        assert "> here\nHello world" in answer
        assert "what engine 'random-tiny' has kept cannot be read: " in answer
        assert reason in answer


def test_an_engine_that_does_not_answer_is_asked_once_and_named(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%engine start random-tiny --name other", capsys)
    backend.clients["other"].unread_sessions = {"kernel-7": 1}
    engine.answers |= {"transcripts": TimeoutError(), "transcript_sessions": AssertionError("asked again")}
    assert said(shell, "%engine recover", capsys).splitlines() == [
        "nothing found",
        "what engine 'random-tiny' has kept cannot be read: no answer",
        "engine 'other' has 1 answer that nobody has read: %engine recover --session kernel-7",
    ]
    assert said(shell, "%engine recover --session s", capsys).startswith("nothing found of session 's'\n")
    engine.answers = {"transcript_sessions": TimeoutError()}
    found = said(shell, "%engine recover", capsys)
    assert "what engine 'random-tiny' has kept cannot be read: no answer" in found
    assert "--session kernel-7" in found


def test_what_an_engine_does_not_note_or_forget_is_said_and_the_rest_is_done(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%engine start random-tiny --name other", capsys)
    said(shell, "%generate here", capsys)
    backend.clients["other"].kept[None] = [kept("9-b", "there")]
    engine.kept[None] = [kept("9-a", "still there")]
    engine.answers["read_transcripts"] = EngineDeadError("gone")
    shown = said(shell, "%engine recover", capsys)
    assert "still there" in shown
    assert "what engine 'random-tiny' has kept cannot be marked as read: gone" in shown
    assert backend.clients["other"].read[-1] == (None, ["9-b"])
    engine.answers["forget_transcripts"] = TimeoutError()
    assert said(shell, "%engine recover --clear", capsys).splitlines() == [
        "2 answers forgotten",
        "what engine 'random-tiny' has kept cannot be forgotten: no answer",
    ]
    assert said(shell, "%engine recover -l", capsys).count("9-a") == 1


def test_engines_of_the_notebook_that_are_not_attached_are_named(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    engine.kept[None] = [kept("9-a", "from before")]
    # What "Restart and run all" leaves where the first cell starts an engine.
    shell.magics_manager.registry["EngineMagics"]._session._engines.clear()
    said(shell, "%engine start random-tiny --name second", capsys)
    note = (
        "engine 'random-tiny' of this notebook is not attached: `%engine attach random-tiny`, then "
        "`%engine recover` again"
    )
    assert said(shell, "%engine recover", capsys) == f"nothing found\n{note}\n"
    said(shell, "%generate here", capsys)
    shown = said(shell, "%engine recover", capsys)
    assert "> here\nHello world" in shown
    assert note in shown
    assert note in said(shell, "%engine recover -l", capsys)
    assert said(shell, "%engine recover --clear", capsys) == f"1 answer forgotten\n{note}\n"
    assert note not in said(shell, "%engine recover --session s", capsys)
    said(shell, "%engine attach random-tiny", capsys)
    shown = said(shell, "%engine recover", capsys)
    assert "from before" in shown
    assert "not attached" not in shown
    said(shell, "%engine detach second", capsys)
    assert "not attached" not in said(shell, "%engine recover", capsys)


def test_what_a_restarted_core_had_kept_is_said_to_be_lost(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%generate here", capsys)
    engine.connection.ready[0].incarnation = 2
    write_connection(engine.connection)
    assert (
        "engine core 0 of engine 'random-tiny' has died and was started again: what it had kept is lost"
        in said(shell, "%engine recover", capsys)
    )


def test_an_engine_that_died_leaves_the_kernel_its_own_answers(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = None
    said(shell, "%generate -a hi", capsys)
    engine.emit("last words")
    engine.collectors[0].put_error(EngineDeadError("the engine core was killed"))
    with pytest.raises(EngineDeadError):
        shell.user_ns["_"].result(60)
    engine.die()
    assert "last words" in said(shell, "%engine recover", capsys)


def test_after_the_engine_s_end_answers_come_from_the_kept_runs_of_the_notebook(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "/other.ipynb")
    said(shell, "%generate of another notebook", capsys)
    monkeypatch.setenv("JPY_SESSION_NAME", "/mine.ipynb")
    said(shell, "%generate the first", capsys)
    engine.words = ["Good", "bye"]
    said(shell, "%generate -n 2 second", capsys)
    said(shell, "%engine stop", capsys)
    # As after a restart of the kernel.
    shell.magics_manager.registry["EngineMagics"]._session.ongoing.answers.clear()
    answer = said(shell, "%engine recover -o again", capsys)
    assert "of engine 'random-tiny' · complete\n> second\n" in answer
    assert "the first" not in answer
    assert "from the kept runs, since neither this kernel nor an engine has an answer" in answer
    assert [output.text for output in shell.user_ns["again"].outputs] == ["Goodbye", "Goodbye"]
    listed = said(shell, "%engine recover -l", capsys).splitlines()
    assert [line.split()[-1] for line in listed[1:3]] == ["run-3", "run-2"]
    assert " 4 " in listed[1]
    assert "> the first\nHello world\n" in said(shell, "%engine recover run-2", capsys)
    assert "nothing has been kept" in said(shell, "%engine recover --session other", capsys)
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert "no engine runs" in said(shell, "%engine recover", capsys)
