"""A terminal shows what a model or a prompt says as text, whatever it contains."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.answers.diff import AnswerDiff, Earlier
from nbengine.widgets.words import harmless
from tests.unit.magics.conftest import FakeClient

STEERING = "\x1b]0;owned\x07\x1b]52;c;cm0=\x1b\\\x9b2J\x08\rback\x7f\ud800"
WRITTEN = "naïve\u00a0wide\u3000\N{WOMAN}\u200d\N{PERSONAL COMPUTER}\u202f!"


@given(st.text(st.characters(exclude_characters="\r")))
def test_only_what_could_steer_a_terminal_is_replaced(text: str) -> None:
    shown = harmless(text)
    assert len(shown) == len(text)
    shown.encode()
    for before, after in zip(text, shown, strict=True):
        steers = unicodedata.category(before) in ("Cc", "Cs") and before not in "\n\t"
        assert after == ("\N{REPLACEMENT CHARACTER}" if steers else before)


def test_the_line_ends_of_another_system_are_new_lines() -> None:
    assert harmless("a\r\nb\rc") == "a\nb\N{REPLACEMENT CHARACTER}c"


@pytest.mark.parametrize(
    "lines",
    [
        ["%%generate\n{said}"],
        ["%%generate --no-stream -n 2\n{said}"],
        ["%%generate --seed 1,2\n{said}"],
        ["%%generate --each names\n{names}"],
        ["%%generate --diff\n{said}", "%%generate --diff\nother"],
        ["%%chat\n{said}", "%chat --show"],
        ["%generate {said}", "%engine recover"],
        ["%generate {said}", "%engine recover -l"],
    ],
)
def test_an_answer_cannot_steer_the_terminal(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    shell.user_ns["said"] = f"{WRITTEN}\t{STEERING}"
    shell.user_ns["names"] = [STEERING, WRITTEN]
    engine.words = [WRITTEN, "\tmore\n", STEERING]
    for line in lines:
        shell.run_cell(line).raise_error()
    printed = capsys.readouterr().out
    assert {c for c in printed if unicodedata.category(c) in ("Cc", "Cs")} <= {"\n", "\t"}
    assert WRITTEN.split()[0] in printed
    assert "\N{REPLACEMENT CHARACTER}]0;owned" in printed


def test_a_difference_that_is_displayed_is_harmless_and_as_text_it_is_all_there() -> None:
    diff = AnswerDiff(Earlier("", ""), Earlier("", STEERING))
    assert STEERING in str(diff)
    assert not {"\x1b", "\x07", "\x9b"} & set(repr(diff))
