"""The log probabilities of an answer's content: which tokens stand in it, and not in reasoning, markers or calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from nbengine.frontend.parsing.deltas import (
    AnswerDelta,
    ContentDelta,
    MalformedCall,
    ReasoningDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from nbengine.outputs import Logprob

Entry = dict[int, Logprob]


class _Token(NamedTuple):
    """A token, and what is left of its text; `entry` is None once a part of the content has it."""

    text: str
    entry: Entry | None


class ContentLogprobs:
    """The state machine that gives each part of an answer's content the entries of its tokens.

    A parser gets the text token by token here, so that what it returns is near the token that brought it. What it holds
    back waits with its tokens. A token without text, which is the beginning of a character, goes with those behind it;
    the one that ends the answer belongs to no content.
    """

    __slots__ = ("_kind", "_parse", "_read", "_unread")

    def __init__(self, parse: Callable[[str], list[AnswerDelta]]) -> None:
        """Begin an answer; `parse` divides further text of it."""
        self._parse = parse
        self._unread: deque[_Token] = deque()
        """The tokens whose text has not come."""
        self._read: list[_Token] = []
        """The tokens whose text the parser has got, from the first on that may belong to what it returns next."""
        self._kind = ""
        """The kind of the last part: content, reasoning or call."""

    def divide(self, text: str, entries: Iterable[Entry]) -> tuple[list[AnswerDelta], list[list[Entry]]]:
        """Divide further text, of whose tokens these are the entries; return the parts, and the entries of each."""
        for entry in entries:
            own = next(iter(entry.values()))
            self._unread.append(_Token(own.decoded_token or "", entry))
        deltas: list[AnswerDelta] = []
        shares: list[list[Entry]] = []
        for piece in self._pieces(text):
            found = self._parse(piece)
            deltas += found
            shares += self.shares(found)
        return deltas, shares

    def shares(self, deltas: Sequence[AnswerDelta]) -> list[list[Entry]]:
        """Return the entries of each of the parts that the parser has just returned: none unless it is content.

        Texts stand behind each other at the end of what was read, apart from what is held back. A text that goes on
        from the last one stands at the beginning.
        """
        shares: list[list[Entry]] = [[] for _ in deltas]
        texts = [(place, delta, text) for place, delta in enumerate(deltas) if (text := _text_of(delta))]
        if texts:
            read = "".join([token.text for token in self._read])
            end = len(read)
            behind = 0
            for number, (place, delta, text) in reversed(list(enumerate(texts))):
                goes_on = not number and self._kind == _kind_of(delta) and read.startswith(text)
                start, stop = (0, len(text)) if goes_on else _place_of(text, read[:end])
                if _kind_of(delta) == "content":
                    shares[place] = self._entries(start, stop)
                behind = max(behind, stop)
                end = start
            self._forget(behind)
        for delta in deltas:
            if isinstance(delta, ToolCallEnded):
                # The token that ends a call may begin the text behind it.
                del self._read[:-1]
            self._kind = _kind_of(delta) or self._kind
        return shares

    def _pieces(self, text: str) -> Iterator[str]:
        """Cut text into that of each token, which is read with it."""
        unread, read = self._unread, self._read
        while unread and (text or not unread[0].text):
            token = unread.popleft()
            piece = token.text
            if not text.startswith(piece):
                # Decoders leave out spaces: before a full stop, say, or at the beginning.
                piece = piece.lstrip(" ")
            if text.startswith(piece):
                read.append(_Token(piece, token.entry))
                text = text[len(piece) :]
                if piece:
                    yield piece
            elif piece.startswith(text):
                # The rest may be the beginning of a stop string.
                read.append(_Token(text, token.entry))
                unread.appendleft(_Token(piece[len(text) :], None))
                yield text
                text = ""
            else:
                read.append(_Token("", token.entry))
        if text:
            read.append(_Token(text, None))
            yield text

    def _entries(self, start: int, end: int) -> list[Entry]:
        """Take the entries of the tokens that stand between two places of what was read."""
        entries = []
        at = 0
        for place, token in enumerate(self._read):
            behind = at + len(token.text)
            if token.entry is not None and at < end and (behind > start or (at == start and not token.text)):
                entries.append(token.entry)
                self._read[place] = _Token(token.text, None)
            at = behind
        return entries

    def _forget(self, end: int) -> None:
        """Forget what was read before a place."""
        kept = []
        at = 0
        for token in self._read:
            behind = at + len(token.text)
            if behind > end:
                kept.append(_Token(token.text[max(0, end - at) :], token.entry))
            elif at == end and not token.text:
                kept.append(token)
            at = behind
        self._read[:] = kept


def _place_of(text: str, read: str) -> tuple[int, int]:
    """Return where a text stands in what was read: its last place."""
    start = read.rfind(text)
    if start < 0:
        # White space that was held back before a call comes with that behind it.
        text = text.strip()
        start = read.rfind(text)
    # A text that is not what its tokens say gets all that wait.
    return (start, start + len(text)) if start >= 0 else (0, len(read))


def _text_of(delta: AnswerDelta) -> str:
    return delta.text if isinstance(delta, ContentDelta | ReasoningDelta | MalformedCall) else ""


def _kind_of(delta: AnswerDelta) -> str:
    match delta:
        case ContentDelta() | MalformedCall():
            return "content"
        case ReasoningDelta():
            return "reasoning"
        case ToolCallStarted():
            return "call"
        case _:
            return ""
