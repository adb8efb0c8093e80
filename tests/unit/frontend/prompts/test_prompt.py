"""A kept prompt has variables, roles, defaults and examples, and says what is wrong with its values."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.prompts.prompt import Example, Prompt, named

CHAT = """system:
You answer in {language}.
user:
What is 1 + 1?
assistant:
2

user:
What is {question}?
"""


def test_a_text_without_roles_is_one_message_of_the_user() -> None:
    prompt = Prompt("capital", "What is the capital of {country}?\n\nOne word: {{word}}")
    assert prompt.variables == ("country",)
    assert prompt.text(country="Peru") == "What is the capital of Peru?\n\nOne word: {word}"
    assert prompt.messages(country="Peru") == [{"role": "user", "content": prompt.text(country="Peru")}]


def test_lines_of_roles_begin_messages() -> None:
    prompt = Prompt("sum", CHAT)
    assert prompt.variables == ("language", "question")
    assert prompt.messages(language="French", question="2 + 2") == [
        {"role": "system", "content": "You answer in French."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "What is 2 + 2?"},
    ]
    with pytest.raises(InvalidArgumentError, match=r"without roles: those need \.messages\(\)"):
        prompt.text(language="French", question="2 + 2")


def test_a_line_of_a_role_can_be_text() -> None:
    assert Prompt("a", "say\n\\user:\nuser: hi").text() == "say\nuser:\nuser: hi"
    assert Prompt("a", "say\nuser:\n\\user:", raw=True).text() == "say\nuser:\n\\user:"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("hello\nuser:\nhi", "line 2 of the prompt must be the first line where a line names a role"),
        ("user:\nhi\nsystem:\nbe good", "line 3 of the prompt must be the first section"),
        ("user:\n \nassistant:\nyes\nuser:\nno", "line 1 of the prompt must be followed by a text"),
        ("user:\nhi\nassistant:\nyes", "line 3 of the prompt must be followed by a section `user:`"),
        ("system:\nbe good", "line 1 of the prompt must be followed by a section `user:`"),
        (" \n", "the prompt must be a text"),
        ("{x._secret}", "must be without attributes that begin with an underscore"),
        ("half \ud83d", "must be text that can be written as UTF-8"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(source: str, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(complaint)):
        _ = Prompt("a", source).sections


@pytest.mark.parametrize("name", ["", "1a", "a b", "a:1", "@a", "a/b", "../a", "-a"])
def test_a_name_is_a_word(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the name of a prompt must be a letter"):
        Prompt(name, "hi")


def test_a_reference_has_a_name_and_perhaps_a_version() -> None:
    assert named("capital") == ("capital", None)
    assert named("über.v-2:12") == ("über.v-2", 12)
    for wrong in ("capital:", "capital:0", "capital:x", "capital:-1", "1:1", "capital:1234567890"):
        with pytest.raises(InvalidArgumentError, match="NAME or NAME:VERSION"):
            named(wrong)


def test_all_missing_values_are_named_in_one_error() -> None:
    prompt = Prompt("a", "{x} {y} {x} {z}", defaults={"z": "Z"}, version=3)
    with pytest.raises(
        InvalidArgumentError, match=r"prompt a:3 must be complete: x, y have none \(x=… y=…\)"
    ):
        prompt.text()
    with pytest.raises(InvalidArgumentError, match=r"complete: y has none \(y=…\), got \['x'\]"):
        prompt.text(x="X")
    assert prompt.text(x="X", y="Y") == "X Y X Z"
    assert prompt.text(x="X", y="Y", z="other") == "X Y X other"


def test_a_value_for_no_variable_is_refused_with_the_nearest() -> None:
    prompt = Prompt("a", "{country} {{city}}")
    with pytest.raises(
        InvalidArgumentError, match=r"variables \(country; did you mean country\?\), got 'cuntry'"
    ):
        prompt.text(cuntry="Peru")
    with pytest.raises(
        InvalidArgumentError, match=r"\{\{city\}\} is the text \{city\}, and \{city\} a variable"
    ):
        prompt.text(country="Peru", city="Lima")
    with pytest.raises(InvalidArgumentError, match=r"a default of prompt a must be of one of its variables"):
        Prompt("a", "{x}", defaults={"y": "1"})


def test_values_with_parts_fill_fields_that_look_for_them() -> None:
    prompt = Prompt("a", 'of {row["city"]}, {row.size}, {n[1]}')
    row: Any = type("Row", (dict,), {"size": 3})(city="Lima")
    assert prompt.variables == ("row", "n")
    assert prompt.text(row=row, n=[1, 2]) == "of Lima, 3, 2"
    with pytest.raises(
        InvalidArgumentError, match=r'where the prompt looks for them \(\{row\["city"\]\}, \{row.size\}\)'
    ):
        prompt.text(row={}, n=[1, 2])


def test_functions_and_modules_are_no_values() -> None:
    with pytest.raises(InvalidArgumentError, match=r"texts, numbers or what has those"):
        Prompt("a", "{x}").text(x=re)
    with pytest.raises(InvalidArgumentError, match=r"texts, numbers"):
        Prompt("a", "{x.f}").text(x=SimpleNamespace(f=print))


@given(st.text(alphabet="{}x \n:user", max_size=30), st.text(max_size=10))
def test_values_go_in_as_they_are(text: str, value: str) -> None:
    value = value.encode("utf-8", "ignore").decode()
    source = f"say {text}\n{{value}}"
    try:
        prompt = Prompt("a", source, raw=True)
        names = prompt.variables
    except InvalidArgumentError:
        pytest.fail("a raw text is always a prompt")
    filled = prompt.text(**{name: value if name == "value" else "" for name in names})
    assert filled.endswith(f"\n{value}")


def test_examples_stand_before_the_last_message() -> None:
    examples = (Example("Text: {good}", "yes"), Example("Text: bad", "no"))
    prompt = Prompt("mood", "system:\nYes or no.\nuser:\nText: {text}", examples=examples)
    assert prompt.variables == ("text",)
    assert [message["content"] for message in prompt.messages(text="fine")] == [
        "Yes or no.",
        "Text: {good}",
        "yes",
        "Text: bad",
        "no",
        "Text: fine",
    ]


def test_a_text_with_examples_goes_on_where_they_end() -> None:
    prompt = Prompt("mood", "Text: {text}\nMood:", examples=(Example("Text: hurra\nMood:", "good"),))
    assert prompt.text(text="oh") == "Text: hurra\nMood: good\n\nText: oh\nMood:"
    newline = Prompt("mood", "Q\n", examples=(Example("Q\n", "A"),))
    assert newline.text() == "Q\nA\n\nQ\n"
    assert [message["role"] for message in prompt.messages(text="oh")] == ["user", "assistant", "user"]


def test_versions_are_the_same_if_all_that_is_asked_is_the_same() -> None:
    prompt = Prompt("a", "{x} {y}", defaults={"x": "1", "y": "2"})
    assert prompt.digest == Prompt("a", "{x} {y}", defaults={"y": "2", "x": "1"}, version=7, time=3.0).digest
    others = [
        Prompt("a", "{x} {y} ", defaults={"x": "1", "y": "2"}),
        Prompt("a", "{x} {y}", defaults={"x": "1"}),
        Prompt("a", "{x} {y}", raw=True, defaults={"x": "1", "y": "2"}),
        Prompt("a", "{x} {y}", defaults={"x": "1", "y": "2"}, examples=(Example("q", "a"),)),
    ]
    assert len({prompt.digest, *(other.digest for other in others)}) == 5
