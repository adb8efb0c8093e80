"""`%chat` and `%%chat`: what is said to the engine, what is shown, and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, InvalidArgumentError, NBEngineError
from tests.unit.magics.chat_cells import prompts, run
from tests.unit.magics.conftest import FakeClient

Capture = pytest.CaptureFixture[str]


def count_words(engine: FakeClient, max_model_len: int) -> None:
    """Have a prompt's words for its tokens, and a context of `max_model_len` of them."""
    engine.ready.max_model_len = max_model_len

    def render(messages: list[dict[str, str]]) -> Mapping[str, Any]:
        text = " ".join(message["content"] for message in messages)
        return {"prompt": text, "prompt_token_ids": text.split()}

    engine.render_chat = render  # type: ignore[method-assign]


def test_each_message_is_sent_with_all_before_it(shell: InteractiveShell, engine: FakeClient) -> None:
    run(shell, "%%chat --system 'Be brief.' --temperature 0 --max-tokens 9 -o talk\nHi {name}\n")
    shell.user_ns["name"] = "Ann"
    run(shell, '%%chat\nI am {name}: {"a": 1}\n')
    assert prompts(engine) == [
        "<system>Be brief.<user>Hi {name}",
        '<system>Be brief.<user>Hi {name}<assistant>Hello world<user>I am Ann: {"a": 1}',
    ]
    assert (engine.requests[0][1].temperature, engine.requests[0][1].max_tokens) == (0, 9)
    talk = shell.user_ns["talk"]
    assert talk is shell.user_ns["_"]
    assert (talk.text, str(talk), talk.reasoning, len(talk)) == ("Hello world", "Hello world", "", 2)
    assert talk.to_openai() == talk.messages
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 2]
    assert talk.last.token_ids == [5, 4, 2]
    assert (talk.last.num_cached_tokens, talk.last.finish_reason) == (2, "stop")


def test_the_answer_is_printed_with_its_reuse(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    run(shell, "%%chat\nhi\n")
    printed = capsys.readouterr().out
    assert printed.startswith("Hello world\n[3 tokens")
    assert "2 of 4 prompt tokens reused" in printed
    run(shell, "%chat hello")
    assert "Conversation('default', 2 turns)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "sent"),
    [
        ("%chat  what is {x}?  ", "what is {x}?"),
        ("%%chat\n  >>> code  \n\n    indented?\n", "  >>> code  \n\n    indented?"),
        ("c = %chat -- --no flag?", "--no flag?"),
        ("%%chat --name x\n%engine start?\n", "%engine start?"),
    ],
)
def test_a_message_reaches_the_engine_byte_for_byte(
    shell: InteractiveShell, engine: FakeClient, code: str, sent: str
) -> None:
    run(shell, code)
    assert prompts(engine) == [f"<user>{sent}"]


def test_reasoning_is_kept_apart(shell: InteractiveShell, engine: FakeClient, capsys: Capture) -> None:
    engine.words = ["<thi", "nk>two and ", "two</think>", "\n\nFour."]
    run(shell, "%chat -o talk 2 + 2?")
    assert capsys.readouterr().out.startswith("[reasoning … 3 words]\n\nFour.\n[4 tokens")
    talk = shell.user_ns["talk"]
    assert (talk.text, talk.reasoning) == ("Four.", "two and two")
    assert talk.messages[1] == {"role": "assistant", "content": "Four.", "reasoning_content": "two and two"}
    assert talk.to_openai()[1] == {"role": "assistant", "content": "Four."}
    assert talk.last.text == "<think>two and two</think>\n\nFour."


def test_a_template_may_begin_the_reasoning_itself(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.render_chat = lambda messages: {"prompt": "<user>q<assistant><think>\n"}  # type: ignore[method-assign]
    engine.words = ["hm</thi", "nk>", "Yes"]
    run(shell, "%chat -o talk q")
    assert (shell.user_ns["talk"].text, shell.user_ns["talk"].reasoning) == ("Yes", "hm")
    engine.words = ["endless"]
    run(shell, "%chat q")
    assert "[reasoning … 1 word, not finished]\n" in capsys.readouterr().out


def test_an_interrupted_answer_stays_marked_as_such(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    engine.words = None
    submit = engine.submit

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        collector = submit(*args, **kwargs)
        if len(engine.requests) == 1:
            engine.emit("half")

        def get_blocking(timeout: float | None = None) -> Any:
            output = collector.get_nowait()
            if output is None:
                raise KeyboardInterrupt
            return output

        monkeypatch.setattr(collector, "get_blocking", get_blocking)
        return collector

    monkeypatch.setattr(engine, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(shell, "%chat -o talk one")
    talk = shell.user_ns["talk"]
    assert talk is shell.user_ns["_"]
    (turn,) = talk.turns
    assert (turn.text, turn.interrupted, turn.finish_reason) == ("half", True, "abort")
    with pytest.raises(KeyboardInterrupt):
        run(shell, "%chat two")
    assert prompts(engine)[1] == "<user>one<assistant>half<user>two"
    assert len(talk) == 1
    run(shell, "%chat --show")
    assert "1. assistant (interrupted): half" in capsys.readouterr().out


@pytest.mark.parametrize("error", [InvalidArgumentError("x", 1, "less"), EngineDeadError("gone")])
def test_what_the_engine_fails_at_changes_nothing(
    shell: InteractiveShell, engine: FakeClient, error: NBEngineError
) -> None:
    run(shell, "%chat -o talk one", "a", "1")
    engine.refusal = error
    with pytest.raises((UsageError, NBEngineError)):
        run(shell, "%chat --system new two", "a", "2")
    assert [turn.user for turn in shell.user_ns["talk"].turns] == ["one"]
    assert shell.user_ns["talk"].system is None


def test_an_engine_that_dies_within_an_answer_adds_no_turn(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    submit = engine.submit

    def dying(*args: Any, **kwargs: Any) -> Any:
        collector = submit(*args, **kwargs)
        engine.emit("half")
        collector.put_error(EngineDeadError("gone"))
        return collector

    engine.submit = dying  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError):
        run(shell, "%chat -o talk one")
    assert len(shell.user_ns["talk"]) == 0
    assert shell.user_ns["_"] is shell.user_ns["talk"]


def test_too_long_a_conversation_is_one_line_that_says_what_to_do(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    count_words(engine, 9)
    run(shell, "%chat -o talk one two")
    run(shell, "%chat three")
    message = (
        r"the conversation with this message is 9 tokens long, and the context of engine 'random-tiny' holds 9, one "
        r"of them for the answer; `%chat --undo` makes room, `%chat --reset` empties it"
    )
    with pytest.raises(UsageError, match=message):
        run(shell, "%chat four five")
    with pytest.raises(UsageError, match=r"is 12 tokens .*`%chat --undo 2` makes room"):
        run(shell, "%chat " + "x " * 5)
    with pytest.raises(UsageError, match="shorten the message"):
        run(shell, "%chat " + "x " * 9)
    assert len(shell.user_ns["talk"]) == 2
    run(shell, "%chat four")
    assert len(engine.requests) == 3


def test_a_full_context_says_so_under_the_answer(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.ready.max_model_len = 6
    engine.words = None
    submit = engine.submit

    def full(*args: Any, **kwargs: Any) -> Any:
        collector = submit(*args, **kwargs)
        engine.emit("a")
        engine.emit("b", "length")
        return collector

    engine.submit = full  # type: ignore[method-assign]
    run(shell, "%chat one")
    assert "the context of 6 tokens is full: %chat --undo or --reset" in capsys.readouterr().out
    engine.ready.max_model_len = 7
    run(shell, "%chat two")
    assert "is full" not in capsys.readouterr().out


def test_a_model_without_a_chat_template_cannot_talk(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.has_chat_template = False
    with pytest.raises(UsageError, match="has no chat template, so it cannot hold a conversation"):
        run(shell, "%chat hi")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("%chat", "the message is empty"),
        ("%%chat\n  \n", "the message is empty"),
        ("%%chat hello\nworld\n", "unexpected 'hello': the message is the cell's body"),
        ("%chat --show hello", "--show takes no message"),
        ("%chat --reset --undo hello", "invalid int value: 'hello'"),
        ("%chat --reset --undo 1 hello", "cannot go with --undo"),
        ("%chat --load x --reset", "cannot go with --reset"),
        ("%chat --temprature 1 hi", "did you mean --temperature"),
        ("%chat -n 2 hi", "unknown flag -n"),
        ("%chat --set n=2 hi", "goes on with one answer"),
        ("%chat -o 1x hi", "'1x' is not a variable name"),
        ("%chat --name ' ' hi", "--name needs the name"),
        ("%chat --top-p 2 hi", "top_p must be"),
        ("%chat --json --regex a hi", "not allowed with argument"),
    ],
)
def test_a_mistake_is_one_line(shell: InteractiveShell, engine: FakeClient, code: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        run(shell, code)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not engine.requests


def test_json_answers_of_a_conversation(shell: InteractiveShell, engine: FakeClient, capsys: Capture) -> None:
    shell.user_ns["schema"] = {"type": "object"}
    run(shell, "%chat --json schema --logprobs 2 hi")
    params = engine.requests[0][1]
    assert (params.structured_outputs.json, params.logprobs) == ({"type": "object"}, 2)
    assert shell.user_ns["_"].last.is_json


def test_help_has_every_flag_and_is_what_the_question_mark_shows(
    shell: InteractiveShell, capsys: Capture
) -> None:
    run(shell, "%chat -h")
    shown = capsys.readouterr().out
    for flag in (
        "--name",
        "--system",
        "--undo",
        "--reset",
        "--show",
        "--append",
        "--temperature",
        "--logprobs",
        "--json",
    ):
        assert flag in shown
    assert "--noblock" not in shown
    document = shell.find_cell_magic("chat").__doc__
    assert "--undo" in (document or "")
