"""`%%chat --tools`: functions of the notebook are called, the model reads what they return, and goes on."""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import StdinNotImplementedError, UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.conversations.conversation import Conversation
from nbengine.magics.tools.mcp_servers import McpServers
from nbengine.magics.tools.toolbox import NotebookTool
from tests.unit.magics.chat_cells import prompts, run
from tests.unit.magics.conftest import FakeClient

Capture = pytest.CaptureFixture[str]


def call(name: str, arguments: str) -> str:
    """Write a call as a model of the Hermes family does."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Unit(enum.Enum):
    """Units of temperature."""

    CELSIUS = "C"
    FAHRENHEIT = "F"


@pytest.fixture
def said(shell: InteractiveShell) -> list[Any]:
    """Put tools into the notebook; the list has what was asked of them."""
    asked: list[Any] = []

    def temperature(city: str, unit: Unit = Unit.CELSIUS) -> float:
        """Tell the temperature.

        Args:
            city: where
            unit: the scale
        """
        asked.append((city, unit))
        if city == "nowhere":
            raise LookupError("there is no such city")
        return 21.5

    async def later(text: str) -> str:
        """Say it later.

        Args:
            text: what to say
        """
        await asyncio.sleep(0)
        asked.append(text)
        return f"later: {text}"

    def stop() -> None:
        """Stop."""
        signal.raise_signal(signal.SIGINT)

    def undocumented(x: int) -> int:
        return x

    shell.user_ns.update(
        temperature=temperature, later=later, stop=stop, undocumented=undocumented, both=[temperature, later]
    )
    return asked


def test_the_model_goes_on_with_what_its_call_returned(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], capsys: Capture
) -> None:
    engine.turns = [
        ["Let me see. ", call("temperature", '{"city": "Rome", "unit": "F"}')],
        ["It is ", "21.5."],
    ]
    run(shell, "%%chat --tools temperature -o talk\nHow warm is Rome?\n")
    assert said == [("Rome", Unit.FAHRENHEIT)]
    assert prompts(engine) == [
        "<user>How warm is Rome?",
        '<user>How warm is Rome?<assistant>Let me see.(temperature {"city": "Rome", "unit": "F"})<tool>21.5',
    ]
    (schema,) = engine.tools[0]
    assert schema["function"]["parameters"]["properties"]["unit"]["enum"] == ["C", "F"]
    talk = shell.user_ns["talk"]
    (turn,) = talk.turns
    assert (turn.text, turn.finish_reason, len(turn.rounds)) == ("It is 21.5.", "stop", 1)
    (done,) = turn.rounds[0].calls
    assert (done.name, done.result, done.failed) == ("temperature", "21.5", False)
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert talk.to_openai()[2] == {"role": "tool", "content": "21.5", "tool_call_id": done.id}
    printed = capsys.readouterr().out
    assert (
        printed.index("Let me see.")
        < printed.index("temperature(city='Rome', unit='F')")
        < printed.index("It is")
    )
    assert "tool_call>" not in printed


def test_the_tools_of_mcp_servers_are_called(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []

    async def price(arguments: Mapping[str, Any]) -> str:
        await asyncio.sleep(0)
        return f"{arguments['item']}: 3 euros"

    def tools(_servers: McpServers, given: Sequence[str]) -> list[NotebookTool]:
        commands.extend(given)
        return [NotebookTool({"type": "function", "function": {"name": "price"}}, price)]

    monkeypatch.setattr(McpServers, "tools", tools)
    engine.turns = [[call("price", '{"item": "pear"}')], ["Three."]]
    run(shell, '%%chat --mcp "shop --all" --mcp other --tools temperature -o talk\nHow much is a pear?\n')
    assert commands == ["shop --all", "other"]
    assert [tool["function"]["name"] for tool in engine.tools[0]] == ["temperature", "price"]
    (turn,) = shell.user_ns["talk"].turns
    (done,) = turn.rounds[0].calls
    assert (done.name, done.result, turn.text) == ("price", "pear: 3 euros", "Three.")


def test_the_next_message_is_sent_with_calls_and_results(
    shell: InteractiveShell, engine: FakeClient, said: list[Any]
) -> None:
    engine.turns = [[call("later", '{"text": "a"}'), call("later", '{"text": "b"}')], ["Done."]]
    run(shell, "%chat --tools both wait")
    assert said == ["a", "b"]
    run(shell, "%chat and then?")
    assert prompts(engine)[-1] == (
        '<user>wait<assistant>(later {"text": "a"})(later {"text": "b"})<tool>later: a<tool>later: b'
        "<assistant>Done.<user>and then?"
    )
    assert engine.tools[-1] is None


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("temperature", '{"city": "nowhere"}', "LookupError: there is no such city"),
        ("temperature", '{"town": "Rome"}', "InvalidArgumentError: town must be left out"),
        ("temperature", "{}", "InvalidArgumentError: city must be given"),
        (
            "temperature",
            '{"city": "Rome", "unit": "K"}',
            "InvalidArgumentError: unit must be one of 'C', 'F'",
        ),
        ("pressure", "{}", "NBEngineError: there is no tool 'pressure'; the tools are temperature"),
    ],
)
def test_an_error_is_for_the_model_to_read(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], name: str, arguments: str, error: str
) -> None:
    engine.turns = [[call(name, arguments)], ["Sorry."]]
    run(shell, "%chat --tools temperature -o talk hi")
    (turn,) = shell.user_ns["talk"].turns
    (done,) = turn.rounds[0].calls
    assert done.failed
    assert done.result.startswith(error)
    assert turn.text == "Sorry."
    assert prompts(engine)[-1].endswith(f"<tool>{done.result}")


def test_a_call_that_cannot_be_read_stays_in_the_answer_and_a_line_says_why(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], capsys: Capture
) -> None:
    written = '<tool_call>\n{"name": oops</tool_call>'
    engine.turns = [[written]]
    run(shell, "%chat --tools later -o talk hi")
    (turn,) = shell.user_ns["talk"].turns
    assert turn.text == written
    assert not turn.rounds
    assert (
        "a call could not be read, and stays in the answer: the text ended within the call"
        in capsys.readouterr().out
    )


def test_there_are_no_more_calls_than_allowed(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], capsys: Capture
) -> None:
    engine.words = [call("later", '{"text": "again"}')]
    run(shell, "%chat --tools later --max-calls 2 -o talk go")
    assert said == ["again", "again"]
    (turn,) = shell.user_ns["talk"].turns
    assert [len(each.calls) for each in turn.rounds] == [1, 1, 1]
    assert (turn.text, turn.finish_reason) == ("", "tool_calls")
    assert "--max-calls" in turn.rounds[-1].calls[0].result
    assert "--max-calls allows more" in capsys.readouterr().out


@pytest.mark.parametrize(("reply", "asked"), [("y", ["x"]), ("", []), ("no", [])])
def test_a_call_waits_for_consent(
    shell: InteractiveShell,
    engine: FakeClient,
    said: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    reply: str,
    asked: list[str],
) -> None:
    questions: list[str] = []

    def answer(question: str) -> str:
        questions.append(question)
        return reply

    monkeypatch.setattr("builtins.input", answer)
    engine.turns = [[call("later", '{"text": "x"}')], ["Well."]]
    run(shell, "%chat --tools later --confirm -o talk hi")
    assert questions == ["call later(text='x')? [y/N] "]
    assert said == asked
    (turn,) = shell.user_ns["talk"].turns
    assert turn.rounds[0].calls[0].failed is not bool(asked)
    assert turn.text == "Well."


def test_a_frontend_that_cannot_ask_is_told_so_and_the_conversation_stays_whole(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(question: str) -> str:
        raise StdinNotImplementedError(question)

    monkeypatch.setattr("builtins.input", refuse)
    engine.turns = [[call("later", '{"text": "x"}')]]
    with pytest.raises(UsageError, match="--confirm needs a frontend that can ask"):
        run(shell, "%chat --tools later --confirm -o talk hi")
    (turn,) = shell.user_ns["talk"].turns
    assert (said, turn.rounds[0].calls[0].failed) == ([], True)


def test_an_interrupt_leaves_the_conversation_whole(
    shell: InteractiveShell, engine: FakeClient, said: list[Any]
) -> None:
    engine.turns = [[call("later", '{"text": "x"}'), call("stop", "{}"), call("later", '{"text": "y"}')]]
    with pytest.raises(KeyboardInterrupt):
        run(shell, "%chat --tools later,stop -o talk hi")
    assert said == ["x"]
    (turn,) = shell.user_ns["talk"].turns
    assert turn.interrupted
    assert [done.failed for done in turn.rounds[0].calls] == [False, True, True]
    assert "interrupted" in turn.rounds[0].calls[1].result
    run(shell, "%chat go on")
    assert prompts(engine)[-1].endswith("<assistant><user>go on")


def test_a_cell_that_runs_again_replaces_its_turn_with_its_calls(
    shell: InteractiveShell, engine: FakeClient, said: list[Any]
) -> None:
    for execution in ("1", "2"):
        engine.turns = [[call("later", f'{{"text": "{execution}"}}')], ["Done."]]
        run(shell, "%%chat --tools later -o talk\nhi\n", "cell", execution)
    (turn,) = shell.user_ns["talk"].turns
    assert turn.rounds[0].calls[0].result == "later: 2"
    assert prompts(engine)[2] == "<user>hi"


async def test_an_awaited_cell_awaits_its_tools(
    shell: InteractiveShell, engine: FakeClient, said: list[Any]
) -> None:
    engine.turns = [[call("later", '{"text": "x"}')], ["Done."]]
    magic = shell.find_line_magic("chat").__self__
    talk = await magic.stream("--tools later hi")
    assert (said, talk.text) == (["x"], "Done.")


def test_the_first_answer_can_be_made_to_call(
    shell: InteractiveShell, engine: FakeClient, said: list[Any]
) -> None:
    engine.turns = [[call("temperature", '{"city": "Rome"}')], ["Warm."]]
    run(shell, "%chat --tools both --tool-choice temperature hi")
    first, second = (params.structured_outputs for _, params in engine.requests)
    assert first.grammar is not None
    assert '"temperature"' in first.grammar.replace("\\", "")
    assert "later" not in first.grammar
    assert second is None


def test_calls_are_kept_in_files(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], tmp_path: Path
) -> None:
    engine.turns = [[call("temperature", '{"city": "nowhere"}')], ["Sorry."]]
    path = tmp_path / "talk.json"
    run(shell, f"%chat --tools temperature -o talk --save {path} hi")
    loaded = Conversation.load(path)
    assert loaded.turns == shell.user_ns["talk"].turns
    assert loaded.messages == shell.user_ns["talk"].messages
    shown = loaded._repr_mimebundle_()["text/html"]
    assert "there is no such city" in shown


def test_a_result_is_text_and_nothing_else(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], capsys: Capture
) -> None:
    shell.user_ns["hostile"] = hostile = lambda: "<script>alert(1)</script>\x1b[2J\ud800"
    hostile.__name__, hostile.__doc__ = "hostile", "Say something."
    engine.turns = [[call("hostile", "{}")], ["Done."]]
    run(shell, "%chat --tools hostile -o talk hi")
    assert "\x1b[2J" not in capsys.readouterr().out
    talk = shell.user_ns["talk"]
    assert "<script>" not in talk._repr_mimebundle_()["text/html"]
    assert talk.turns[0].rounds[0].calls[0].result.endswith("\\ud800")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tools temprature hi", "there is no variable 'temprature'; did you mean temperature?"),
        ("--tools undocumented hi", "it has no docstring"),
        ("--tools said hi", "there is no variable 'said'"),
        ("--tools both,later hi", "two tools have the name 'later'"),
        ("--tools later --choice a,b hi", "--json, --regex and --choice leave no room for calls"),
        ("--tools later --max-calls 0 hi", "--max-calls must be at least 1, got 0"),
        ("--confirm hi", "--confirm needs --tools"),
        ("--tools later.nothing hi", "has no attribute 'nothing'"),
        ("--tools later --tool-choice never hi", "tool_choice must be the name of a tool (later)"),
        ("--tools , hi", "--tools needs the names of functions"),
    ],
)
def test_what_is_not_possible_is_refused_before_anything_is_sent(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], line: str, message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        run(shell, f"%chat {line}")
    assert message in str(raised.value)
    assert engine.requests == []


def test_a_model_whose_calls_nobody_can_read_is_named(
    shell: InteractiveShell, engine: FakeClient, said: list[Any]
) -> None:
    engine.calls_tools = False
    with pytest.raises(
        UsageError, match="does not tell how its model calls tools; --tool-parser names the form"
    ):
        run(shell, "%chat --tools later hi")


def test_what_tools_have_done_is_kept_when_the_engine_fails(
    shell: InteractiveShell, engine: FakeClient, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.turns = [[call("later", '{"text": "x"}')]]
    submit: Callable[..., Any] = engine.submit

    def once(*arguments: Any, **options: Any) -> Any:
        if engine.requests:
            raise UsageError("no more")
        return submit(*arguments, **options)

    monkeypatch.setattr(engine, "submit", once)
    with pytest.raises(UsageError, match="no more"):
        run(shell, "%chat --tools later -o talk hi")
    (turn,) = shell.user_ns["talk"].turns
    assert turn.rounds[0].calls[0].result == "later: x"
