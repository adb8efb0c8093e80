"""`nbengine chat`: what is typed, what the model is asked, and what stands on the screen."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from nbengine.cli.chatting import HELP, Chat
from nbengine.errors import EngineDeadError, NBEngineError, RequestError
from tests.unit.magics.conftest import FakeClient

Line = str | type[BaseException]


def talk(client: FakeClient, *lines: Line) -> tuple[str, int, Chat]:
    """Type lines, and exceptions that the keyboard raises; return the screen, the status and the chat."""
    typed = iter(lines)

    def read(mark: str) -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    out = io.StringIO()
    chat = Chat(client, read, out)  # type: ignore[arg-type]
    status = chat.run()
    return out.getvalue(), status, chat


def test_each_message_is_asked_with_all_that_was_said_before(engine: FakeClient) -> None:
    said, status, _ = talk(engine, "Hi", "", "and \\", "then?")
    prompts = [prompt["prompt"] for prompt, _ in engine.requests]
    assert prompts == ["<user>Hi", "<user>Hi<assistant>Hello world<user>and \nthen?"]
    assert said.splitlines()[1:] == ["Hello world", "Hello world"]
    assert status == 0


def test_an_interrupt_ends_the_answer_alone_and_keeps_its_text(engine: FakeClient) -> None:
    engine.words = None
    submit = engine.submit

    def slow(*arguments: object, **options: object) -> object:
        collector = submit(*arguments, **options)  # type: ignore[arg-type]
        engine.emit("Half")
        get: Callable[..., object] = collector.get_blocking
        steps = iter([get, _interrupted, get])
        collector.get_blocking = lambda: next(steps)()  # type: ignore[method-assign,misc,assignment,return-value]
        return collector

    def _interrupted() -> None:
        raise KeyboardInterrupt

    engine.abort_soon = lambda request_id: engine.emit("", "abort")  # type: ignore[method-assign]
    engine.submit = slow  # type: ignore[method-assign,assignment]
    said, status, chat = talk(engine, "Hi", KeyboardInterrupt, "/history")
    assert "Half\n(interrupted)" in said
    assert "(Ctrl-D or /quit leaves)" in said
    assert "> Hi\nHalf (interrupted)" in said
    assert (status, chat.conversation.turns[0].finish_reason) == (0, "abort")


def test_parameters_are_set_shown_and_sent(engine: FakeClient) -> None:
    said, _, _ = talk(engine, "/set temperature=0", '/set stop=["x"]', "Hi")
    params = engine.requests[0][1]
    assert (params.temperature, params.stop, params.max_tokens) == (0, ["x"], 512)
    assert "max_tokens=512, temperature=0, stop=['x']" in said


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/sett a", "there is no /sett; did you mean set?"),
        ("/set temperature", "NAME=VALUE"),
        ("/set temprature=1", "did you mean temperature?"),
        ("/set temperature=-1", "temperature"),
        ("/undo x", "a number of turns"),
        ("/undo", "left out: there are no turns"),
        ("/retry", "left out: there are no turns"),
        ("/save", "the name of a file"),
        ("/load /nowhere/at-all", "cannot read a conversation"),
        ("/\x1b[2J", "there is no /\ufffd[2J"),
    ],
)
def test_a_mistake_is_told_and_the_talk_goes_on(engine: FakeClient, line: str, complaint: str) -> None:
    said, _, _ = talk(engine, line, "Hi")
    assert complaint in said
    assert said.endswith("Hello world\n")
    assert "\x1b" not in said


def test_turns_are_taken_back_asked_again_and_forgotten(engine: FakeClient, tmp_path: Path) -> None:
    file = str(tmp_path / "talk.json")
    engine.turns = [["one"], ["two"], ["three"]]
    said, _, chat = talk(
        engine,
        "/system Be brief",
        "a",
        "b",
        "/undo",
        "/retry",
        f"/save {file}",
        "/reset",
        f"/load {file}",
        "/quit",
        "c",
    )
    prompts = [prompt["prompt"] for prompt, _ in engine.requests]
    assert prompts[-1] == "<system>Be brief<user>a"
    assert [(turn.user, turn.text) for turn in chat.conversation.turns] == [("a", "three")]
    assert chat.conversation.system == "Be brief"
    assert "1 turn is taken back, 1 left" in said
    assert "the conversation is empty" in said


def test_reasoning_is_shown_and_kept_apart(engine: FakeClient) -> None:
    engine.thinks = "always"
    engine.words = ["Where?", "</think>", "Here", " it is"]
    _, _, chat = talk(engine, "Hi")
    assert chat.conversation.text == "Here it is"
    assert "Where?" in chat.conversation.reasoning


def test_what_a_model_writes_does_not_steer_the_terminal(engine: FakeClient) -> None:
    engine.words = ["a\x1b]0;title\x07", "b"]
    said, _, _ = talk(engine, "Hi")
    assert "\x1b" not in said
    assert "\x07" not in said


def test_a_message_that_is_refused_leaves_the_conversation_and_a_status(engine: FakeClient) -> None:
    engine.refusal = RequestError("too long")
    said, status, chat = talk(engine, "Hi", "/help")
    assert "nbengine: too long" in said
    assert HELP in said
    assert (status, len(chat.conversation)) == (1, 0)


def test_the_end_of_the_engine_ends_the_talk(engine: FakeClient) -> None:
    engine.refusal = EngineDeadError("gone")
    with pytest.raises(EngineDeadError, match="gone"):
        talk(engine, "Hi", "again")


def test_a_model_without_a_template_cannot_talk(engine: FakeClient) -> None:
    engine.has_chat_template = False
    with pytest.raises(NBEngineError, match="has no chat template"):
        talk(engine)
