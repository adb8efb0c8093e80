"""Word diffs: exact, readable, harmless."""

from __future__ import annotations

import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.errors import InvalidArgumentError
from nbengine.magics.answers.diff import AnswerDiff, Earlier, diff_html, diff_text, word_diff
from nbengine.magics.generation.result import GenerationResult
from nbengine.outputs import CompletionOutput, RequestOutput

TEXT = st.lists(
    st.sampled_from(["the", "sea", "is", ",", ".", " ", "\n", "  ", "日本", "語", "<b>", "é"]), max_size=14
).map("".join)


def result_of(prompt: str, text: str) -> GenerationResult:
    result = GenerationResult("r", prompt)
    result.absorb(RequestOutput("r", None, [1], [CompletionOutput(0, text, [1], finish_reason="stop")], True))
    return result


@given(TEXT | st.text(max_size=20), TEXT | st.text(max_size=20))
def test_the_parts_make_both_texts(old: str, new: str) -> None:
    parts = word_diff(old, new)
    assert "".join(part.text for part in parts if part.kind != "inserted") == old
    assert "".join(part.text for part in parts if part.kind != "deleted") == new
    assert all(part.text for part in parts)
    if old == new:
        assert {part.kind for part in parts} <= {"same"}


def test_only_the_words_that_changed_are_marked() -> None:
    parts = word_diff("The sky is blue, today. So it is.", "The sea is green, today. So it is.")
    assert diff_text(parts) == "The [-sky-]{+sea+} is [-blue-]{+green+}, today. So it is."
    assert diff_text(word_diff("a b", "a b c")) == "a b{+ c+}"


def test_a_sign_between_two_changes_does_not_cut_them() -> None:
    parts = word_diff("red, green", "blue, yellow")
    assert [(part.kind, part.text) for part in parts] == [
        ("deleted", "red, green"),
        ("inserted", "blue, yellow"),
    ]


def test_signs_that_are_words_are_compared_one_by_one() -> None:
    assert [(p.kind, p.text) for p in word_diff("東京は首都", "京都は首都")] == [
        ("deleted", "東"),
        ("same", "京"),
        ("inserted", "都"),
        ("same", "は首都"),
    ]


def test_long_texts_are_compared_by_lines() -> None:
    lines = [f"line {number} of many\n" for number in range(8_000)]
    changed = [*lines[:100], "other\n", *lines[101:]]
    parts = word_diff("".join(lines), "".join(changed))
    assert [(p.kind, p.text) for p in parts if p.kind != "same"] == [
        ("deleted", "line 100 of many"),
        ("inserted", "other"),
    ]


def test_markup_in_the_texts_is_dead() -> None:
    hostile = "</ins><script>alert(1)</script><img src=x onerror=alert(1)>"
    for old, new in ((hostile, "x"), ("x", hostile), (hostile, hostile)):
        html = AnswerDiff(Earlier(old, old), Earlier(new, new)).html
        bare = re.sub(r"</?(?:div|ins|del)(?: (?:class|style)=\"[^\"<>]*\")*>", "", html)
        assert "<" not in bare
        assert "alert(1)" in unescape(bare)


def test_the_html_says_it_without_colours_too() -> None:
    html = diff_html(word_diff("old", "new"))
    assert re.fullmatch(
        r'<del style="[^"]*line-through[^"]*">old</del><ins style="[^"]*underline[^"]*">new</ins>', html
    )


def test_a_result_is_compared_with_another_one_or_a_text_or_the_one_before() -> None:
    old, new = result_of("Spain?", "It is Madrid."), result_of("Italy?", "It is Rome.")
    diff = new.diff(old)
    assert str(diff) == (
        "[against the other answer: 1 word new, 1 gone]\nprompt:\n[-Spain-]{+Italy+}?\nanswer:\n"
        "It is [-Madrid-]{+Rome+}."
    )
    assert repr(diff) == str(diff)
    assert "prompt" in diff._repr_html_()
    assert diff.changed
    assert str(new.diff("It is Rome.")) == "[the same answer]\nIt is Rome."
    assert not new.diff("It is Rome.").changed
    with pytest.raises(InvalidArgumentError, match=r"other must be an answer to compare with: .* got None"):
        new.diff()
    new.previous = Earlier("Spain?", "It is Madrid.")
    assert str(new.diff()) == str(diff)
