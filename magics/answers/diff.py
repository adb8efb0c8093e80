"""This module finds the words in which a text differs from an earlier one, as HTML and as plain text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from nbengine.widgets.words import MUTED, PLAIN, PROSE, harmless

_WORDS = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff]\s*|[^\W\u2e80-\u9fff\uf900-\ufaff]+\s*|[^\w\s]\s*|\s+")
"""Words with the blanks behind them; a sign that stands for a whole word counts as one."""
_LETTER = re.compile(r"\w")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_MOST_WORDS = 20_000
"""The most words that are compared one by one; longer texts are compared by lines, which takes less time."""
_MOST_PRECISE = 2_000
"""Up to this many words, frequent ones count as much as rare ones."""
# Blue and orange differ for every kind of colour blindness; the line styles say the same without colour.
_INSERTED = "background:rgba(38,132,255,0.22);text-decoration:underline;text-decoration-thickness:2px"
_DELETED = "background:rgba(230,126,0,0.24);text-decoration:line-through"

Kind = Literal["same", "inserted", "deleted"]


@dataclass(frozen=True)
class Earlier:
    """A prompt and the answer that it had."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Part:
    """A piece of two texts: in both, only in the new one, or only in the old one."""

    kind: Kind
    text: str


def word_diff(old: str, new: str) -> list[Part]:
    """Return the parts of two texts in order; deleted text stands before the text that took its place.

    The parts that are not inserted make up the old text, and those that are not deleted the new one.
    """
    before, after = _WORDS.findall(old), _WORDS.findall(new)
    if max(len(before), len(after)) > _MOST_WORDS:
        before, after = _LINES.findall(old), _LINES.findall(new)
    parts = _Parts()
    keys = [word.rstrip() or word for word in before], [word.rstrip() or word for word in after]
    precise = max(len(before), len(after)) <= _MOST_PRECISE
    matcher = difflib.SequenceMatcher(None, *keys, autojunk=not precise)
    for tag, start, end, new_start, new_end in matcher.get_opcodes():
        was, now = before[start:end], after[new_start:new_end]
        if tag == "equal" and (parts.settled or any(map(_LETTER.search, now))):
            for old_word, new_word in zip(was, now, strict=True):
                parts.same(old_word, new_word)
        else:
            # A comma that both texts happen to have is no reason to cut a change in two.
            parts.changed("".join(was), "".join(now))
    return parts.end()


class _Parts:
    """The parts of a diff while it is made: it joins equal words, and the changes between two equal words."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._same = self._deleted = self._inserted = ""

    @property
    def settled(self) -> bool:
        """Return whether no change is open."""
        return not (self._deleted or self._inserted)

    def same(self, old: str, new: str) -> None:
        """Add a word that both texts have; only the blanks behind it may differ."""
        if not self.settled:
            self._flush()
        word = new if old == new else new.rstrip()
        self._same += word
        self.changed(old[len(word) :], new[len(word) :])

    def changed(self, old: str, new: str) -> None:
        """Add a change: `new` takes the place of `old`."""
        self._deleted += old
        self._inserted += new

    def end(self) -> list[Part]:
        """Close the open parts, and return all parts."""
        self._flush()
        self._flush()
        return self._parts

    def _flush(self) -> None:
        tail = _common_signs(self._deleted, self._inserted)
        end = -len(tail) or None
        found: tuple[tuple[Kind, str], ...] = (
            ("same", self._same),
            ("deleted", self._deleted[:end]),
            ("inserted", self._inserted[:end]),
        )
        self._parts += [Part(kind, text) for kind, text in found if text]
        self._same, self._deleted, self._inserted = tail, "", ""


def _common_signs(old: str, new: str) -> str:
    """Find the blanks and signs with which both texts end: what follows a change is no part of it."""
    length = 0
    while length < min(len(old), len(new)) and old[-1 - length] == new[-1 - length]:
        if old[-1 - length].isalnum():
            break
        length += 1
    return new[len(new) - length :]


def diff_html(parts: Sequence[Part]) -> str:
    """Render the parts as HTML: insertions are underlined, deletions struck through."""
    shown = {
        "same": "{}",
        "inserted": f'<ins style="{_INSERTED}">{{}}</ins>',
        "deleted": f'<del style="{_DELETED}">{{}}</del>',
    }
    return "".join(shown[part.kind].format(escape(part.text)) for part in parts)


def diff_text(parts: Sequence[Part]) -> str:
    """Render the parts as plain text: `{+inserted+}`, `[-deleted-]`."""
    shown = {"same": "{}", "inserted": "{{+{}+}}", "deleted": "[-{}-]"}
    pieces = []
    for part in parts:
        core = part.text.rstrip()
        pieces.append(shown[part.kind].format(core) + part.text[len(core) :] if core else part.text)
    return "".join(pieces)


class AnswerDiff:
    """The difference of an answer and its prompt from an earlier one; `prompt` and `text` have the parts."""

    def __init__(self, old: Earlier, new: Earlier) -> None:
        self.prompt = word_diff(old.prompt, new.prompt)
        self.text = word_diff(old.text, new.text)

    @property
    def changed(self) -> bool:
        """Return whether the answers differ."""
        return any(part.kind != "same" for part in self.text)

    @property
    def summary(self) -> str:
        """Say in words how much of the answer differs."""
        if not self.changed:
            return "the same answer"
        new, gone = (
            sum(len(part.text.split()) for part in self.text if part.kind == kind)
            for kind in ("inserted", "deleted")
        )
        return f"against the other answer: {new} word{'' if new == 1 else 's'} new, {gone} gone"

    def _repr_html_(self) -> str:
        return self.html

    @property
    def html(self) -> str:
        """Render both diffs as HTML, that of the prompt only where it has changed."""
        prompt = ""
        if any(part.kind != "same" for part in self.prompt):
            prompt = (
                f'<div style="{MUTED};margin-top:0.4em">prompt</div>'
                f'<div style="{PROSE}">{diff_html(self.prompt)}</div>'
                f'<div style="{MUTED};margin-top:0.4em">answer</div>'
            )
        return (
            f'<div {PLAIN}><div style="{MUTED}">{escape(self.summary)}</div>{prompt}'
            f'<div style="{PROSE}">{diff_html(self.text)}</div></div>'
        )

    def __str__(self) -> str:
        lines = [f"[{self.summary}]"]
        if any(part.kind != "same" for part in self.prompt):
            lines += ["prompt:", diff_text(self.prompt), "answer:"]
        return "\n".join([*lines, diff_text(self.text)])

    def __repr__(self) -> str:
        return harmless(str(self))
