"""A line says whether and how long a model thinks, and what else its chat template is told."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from tests.unit.magics.conftest import FakeClient

Capture = pytest.CaptureFixture[str]
FLAGS = ["--json '{}'", "--regex [0-9]+", "--choice yes,no"]
ASKS = ["%%generate {flag}\nhello\n", "%%chat {flag}\nhello\n"]
COMPARES = "%%generate --temperature 0,1 {flag}\nhello\n"
ON, OFF = ({"enable_thinking": on, "thinking": on} for on in (True, False))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("ask", ASKS)
def test_a_model_that_can_answer_in_a_form_at_once_does(
    shell: InteractiveShell, engine: FakeClient, ask: str, flag: str
) -> None:
    engine.thinks = "switch"
    shell.run_cell(ask.format(flag=flag)).raise_error()
    ((prompt, params),) = engine.requests
    assert params.structured_outputs is not None
    assert prompt["prompt"] == "<user>hello<think>\n\n</think>\n\n"
    assert prompt["reasoning"] is None


@pytest.mark.parametrize("ask", [*ASKS, COMPARES])
@pytest.mark.parametrize(("thinks", "flag"), [("always", ""), ("switch", "--think")])
def test_one_that_thinks_first_answers_in_the_form_behind_its_thoughts(
    shell: InteractiveShell, engine: FakeClient, ask: str, thinks: str, flag: str
) -> None:
    engine.thinks = thinks
    shell.run_cell(ask.format(flag=f"{flag} {FLAGS[0]}")).raise_error()
    for prompt, params in engine.requests:
        assert params.structured_outputs is not None
        assert prompt["prompt"] == "<user>hello<think>\n"
        assert prompt["reasoning"].openings == ()


@pytest.mark.parametrize("written", ['thoughts</think>\n\n{"a": 1}', '<think>{</think>{"a": 1}', '{"a": 1}'])
def test_the_value_of_json_is_that_of_the_answer(
    shell: InteractiveShell, engine: FakeClient, written: str
) -> None:
    engine.thinks = "always" if written.startswith("thoughts") else "switch"
    engine.words = [written[:5], written[5:]]
    shell.run_cell("%%generate --think --json\nhello\n").raise_error()
    assert shell.user_ns["_"].value == {"a": 1}
    assert shell.user_ns["_"].text == written


@pytest.mark.parametrize("ask", ASKS)
def test_without_a_form_a_model_thinks_as_it_likes(
    shell: InteractiveShell, engine: FakeClient, ask: str
) -> None:
    engine.thinks = "switch"
    shell.run_cell(ask.format(flag="")).raise_error()
    assert engine.requests[0][0]["prompt"] == "<user>hello<think>\n"
    assert engine.template_variables == [{}]


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ("--think", ON),
        ("--no-think", OFF),
        ("--choice a,b", OFF),
        ("--choice a,b --template enable_thinking=true", OFF | {"enable_thinking": True}),
        (
            "--template reasoning_effort=high --template day='{day}'",
            {"reasoning_effort": "high", "day": "Monday"},
        ),
        ("--no-think --template depth=3", OFF | {"depth": 3}),
        ('--template documents=\'[{"title": "x"}]\'', {"documents": [{"title": "x"}]}),
    ],
)
@pytest.mark.parametrize("ask", ASKS)
def test_variables_reach_the_template(
    shell: InteractiveShell, engine: FakeClient, ask: str, flags: str, variables: dict[str, Any]
) -> None:
    engine.thinks = "switch"
    shell.user_ns["day"] = "Monday"
    shell.run_cell(ask.format(flag=flags)).raise_error()
    assert engine.template_variables == [variables]


@pytest.mark.parametrize("ask", ASKS)
def test_a_budget_of_thinking_is_a_sampling_parameter(
    shell: InteractiveShell, engine: FakeClient, ask: str
) -> None:
    engine.thinks = "always"
    shell.run_cell(ask.format(flag="--thinking-budget 200")).raise_error()
    assert engine.requests[0][1].thinking_budget == 200


def test_budgets_are_compared(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.thinks = "always"
    shell.run_cell("%%generate --thinking-budget 0,50\nhello\n").raise_error()
    assert [params.thinking_budget for _, params in engine.requests] == [0, 50]


@pytest.mark.parametrize("ask", [*ASKS, COMPARES])
@pytest.mark.parametrize(
    ("thinks", "flag", "complaint"),
    [
        ("always", "--no-think", "always thinks before it answers; --thinking-budget N bounds that"),
        (None, "--think", "has no thinking that could be switched on with enable_thinking or thinking"),
        ("switch", "--think --no-think", "not allowed with argument --think"),
        ("switch", "--template depth", "'depth' is not of the form key=value"),
    ],
)
def test_what_a_model_cannot_do_is_told_before_anything_is_sent(
    shell: InteractiveShell,
    engine: FakeClient,
    capsys: Capture,
    ask: str,
    thinks: str | None,
    flag: str,
    complaint: str,
) -> None:
    engine.thinks = thinks
    assert isinstance(shell.run_cell(ask.format(flag=flag)).error_in_exec, UsageError)
    assert complaint in " ".join(capsys.readouterr().err.split())
    assert engine.requests == []
    # Nothing was said, so that the conversation has no turn.
    assert "conversation 'default' is empty" in shown(shell, capsys)


@pytest.mark.parametrize("flag", ["--think", "--no-think", "--template a=1", "--thinking-budget 3"])
def test_a_prompt_that_is_sent_as_it_is_has_no_template_to_tell(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, flag: str
) -> None:
    assert isinstance(shell.run_cell(f"%%generate --raw {flag}\nhello\n").error_in_exec, UsageError)
    assert "need a chat prompt, so they cannot go with --raw" in " ".join(capsys.readouterr().err.split())
    engine.has_chat_template = False
    if "budget" not in flag:
        assert isinstance(shell.run_cell(f"%%generate {flag}\nhello\n").error_in_exec, UsageError)
        assert "has no chat template" in capsys.readouterr().err


def shown(shell: InteractiveShell, capsys: Capture) -> str:
    capsys.readouterr()
    shell.run_cell("%chat --show").raise_error()
    return capsys.readouterr().out
