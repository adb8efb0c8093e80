"""Tokens as they are shown, and as HTML that needs no script."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from answers import entry_of, token_id
from hypothesis import given
from hypothesis import strategies as st

from nbengine.outputs import Logprob
from nbengine.widgets.tokens.cells import PART, alternatives_of, label_of, percent, shade, token_cells
from nbengine.widgets.tokens.html import tokens_html, tooltip

HOSTILE = ["<script>alert(1)</script>", "</span>", '"', "' onload='x", "&lt;", "<!--", "]]>", "`${x}`"]


class Reader(HTMLParser):
    """A reader of HTML that keeps what a browser would: tags, titles and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert {name for name, _ in attrs} <= {"title", "style"}
        self.titles += [value or "" for name, value in attrs if name == "title"]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("probability", "words"),
    [
        (1.0, "100 %"),
        (0.123, "12 %"),
        (0.0312, "3.1 %"),
        (0.0002, "0.02 %"),
        (1e-9, "< 0.01 %"),
        (None, "unknown"),
    ],
)
def test_probabilities_are_put_into_words(probability: float | None, words: str) -> None:
    assert percent(probability) == words


def test_less_probable_tokens_are_shaded_more() -> None:
    shades = [shade(probability) for probability in (1.0, 0.95, 0.5, 0.1, 0.0)]
    assert shades == [0, 0, 5, 9, 9]
    assert shade(None) == 0


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("word", [("", "word")]),
        (" two words ", [("", " two words ")]),
        (" ", [("", " ")]),
        ("  ", [("·", " "), ("·", " ")]),
        ("\n", [("⏎", "\n")]),
        (" a.\n\nb", [("", " a."), ("⏎", "\n"), ("⏎", "\n"), ("", "b")]),
        ("\t", [("⇥", "\t")]),
        ("", [(PART, "")]),
        (None, [("⟨7⟩", "")]),
        ("\u200b", [("⟨U+200B⟩", "\u200b")]),
        ("\u200d", [("⟨U+200D⟩", "\u200d")]),
        ("👩\u200d🚀", [("", "👩\u200d🚀")]),
        ("\x07", [("⟨U+0007⟩", "")]),
        ("a\u202eb", [("", "a"), ("⟨U+202E⟩", ""), ("", "b")]),
    ],
)
def test_what_cannot_be_seen_has_a_mark(text: str | None, pieces: list[tuple[str, str]]) -> None:
    (cell,) = token_cells([7], [{7: Logprob(-0.1, 1, text)}], 5)
    assert list(cell.pieces) == pieces


def test_labels_show_every_character() -> None:
    assert label_of(3, " two words\n") == "·two·words⏎"
    assert label_of(3, "") == f"{PART} token 3, part of a character"
    assert label_of(3, None) == "token 3"


def test_alternatives_are_in_the_order_of_their_probability_and_the_unknown_left_out() -> None:
    entry = {9: Logprob(float("nan")), **entry_of(("b", 0.2, {"a": 0.5, "c": 0.1}))}
    assert [alternative.label for alternative in alternatives_of(entry, 5)] == ["a", "b", "c"]
    assert [alternative.label for alternative in alternatives_of(entry, 2)] == ["a", "b"]
    (cell,) = token_cells([9], [entry], 5)
    assert (cell.probability, cell.pieces) == (None, (("⟨9⟩", ""),))


def test_the_tooltip_names_the_token_and_what_matters() -> None:
    entry = entry_of((" Paris", 0.55, {" Lyon": 0.2, " x": 0.0001}))
    (cell,) = token_cells([token_id(" Paris")], [entry], 5)
    assert tooltip(cell).splitlines() == ["55 %, rank 1", "▸ 55 %  ·Paris", "  20 %  ·Lyon"]


@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(HOSTILE), min_size=1, max_size=6
    )
)
def test_no_token_is_html_wherever_it_stands(texts: list[str]) -> None:
    entries = [
        {index: Logprob(-1.0, 1, text), 99: Logprob(-1.5, 2, text)} for index, text in enumerate(texts)
    ]
    cells = token_cells(range(len(texts)), entries, 5)
    html = tokens_html(cells, 1)
    reader = Reader(html)
    assert set(reader.tags) == {"span"}
    assert len(reader.titles) == len(texts)
    assert reader.text == "".join(mark + text for cell in cells for mark, text in cell.pieces)
    assert all(len(title.splitlines()) >= 1 for title in reader.titles)


def test_shading_is_inline_and_what_is_no_text_is_paler() -> None:
    entries = [entry_of(("a", 0.45, {})), entry_of(("b", 1.0, {}))]
    html = tokens_html(token_cells([token_id("a"), token_id("b")], entries, 5), 1)
    first, second = re.findall(r"<span[^>]*>[^<]*</span>", html)
    assert "background:#e8590c50" in first
    assert "opacity" not in first
    assert "background" not in second
    assert "opacity:.7" in second
