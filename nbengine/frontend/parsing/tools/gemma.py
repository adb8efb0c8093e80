"""Calls as Gemma 4 and FunctionGemma write them, with strings between markers in place of quotes."""

from __future__ import annotations

import re

from nbengine.frontend.parsing.json_text import escaped, quoted
from nbengine.frontend.parsing.markers import Markers
from nbengine.frontend.parsing.schemas import UNKNOWN, ToolTypes, json_of
from nbengine.frontend.parsing.tools.base import MOST_NAME, ToolParser

_HEAD = re.compile(r"\s*call:\s*([\w.:/-]+)\s*")
_KEY_END = re.compile(r"[:,{}\[\]]")
_VALUE_END = re.compile(r"[,}\]]")
_IN_QUOTES = re.compile(r'["\\]')
GEMMA4_QUOTE, FUNCTIONGEMMA_QUOTE = '<|"|>', "<escape>"


class GemmaToolParser(ToolParser):
    """The parser of `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>` (Gemma 4) and of
    `<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>` (FunctionGemma).

    Keys stand without quotes, values as in JSON but for strings. The arguments are handed out as they come.
    """

    begins = ("<|tool_call>", "<start_function_call>")
    ends = ("<tool_call|>", "<end_function_call>")

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._quotes = Markers.of(GEMMA4_QUOTE, FUNCTIONGEMMA_QUOTE)
        self._brackets: list[str] = []
        """The brackets that are open."""
        self._wants_key = False

    @classmethod
    def markers(cls) -> frozenset[str]:
        return frozenset((*cls.begins, *cls.ends, GEMMA4_QUOTE, FUNCTIONGEMMA_QUOTE))

    def _begin_call(self, marker: str) -> None:
        del marker
        self._state = self._in_head

    def _in_head(self) -> bool:
        text, start = self._text, self._at
        brace = text.find("{", start)
        if brace < 0 and len(text) - start <= MOST_NAME:
            return False
        head = None if brace < 0 or brace - start > MOST_NAME else _HEAD.fullmatch(text, start, brace)
        if head is None:
            self._fail("no name with arguments follows its beginning")
            return True
        self._take(brace)
        self._start(head[1])
        self._brackets = []
        self._wants_key = False
        self._state = self._in_body
        return True

    def _in_body(self) -> bool:
        """Read the next part of the arguments: a bracket, a comma, a key or a value."""
        text = self._text
        place = self._behind_spaces(self._at)
        self._take(place)
        if place == len(text):
            return False
        character = text[place]
        if character in "{[":
            self._brackets.append(character)
            self._wants_key = character == "{"
            self._argue(self._take(place + 1))
        elif character in "}]":
            self._close_bracket()
        elif character == ",":
            self._wants_key = self._brackets[-1] == "{"
            self._take(place + 1)
            self._argue(", ")
        elif character == ":":
            self._wants_key = False
            self._take(place + 1)
            self._argue(": ")
        elif character == '"':
            self._argue(self._take(place + 1))
            self._state = self._in_quotes
        elif (quote := self._quotes.at(text, place)) is not None:
            self._take(quote.end())
            self._argue('"')
            self._state = self._in_string
        elif self._quotes.may_begin_at(text, place):
            return False
        else:
            return self._bare()
        return True

    def _close_bracket(self) -> None:
        self._argue(self._take(self._at + 1))
        self._brackets.pop()
        self._wants_key = False
        if not self._brackets:
            self._end()

    def _bare(self) -> bool:
        """Read a key, or a value that is no string."""
        text, start = self._text, self._at
        match = (_KEY_END if self._wants_key else _VALUE_END).search(text, start)
        if match is None:
            return False
        word = text[start : match.start()].strip()
        is_odd = match[0] != ":" if self._wants_key else self._quotes.find(word, 0) or set(word) & set('{["')
        if is_odd:
            self._fail("a key or a value cannot be read")
            return True
        self._take(match.start())
        self._argue(quoted(word) if self._wants_key else json_of(word, UNKNOWN))
        return True

    def _in_string(self) -> bool:
        text, start = self._text, self._at
        match = self._quotes.find(text, start)
        end = self._quotes.held_from(text, start) if match is None else match.start()
        self._argue(escaped(self._take(end)))
        if match is None:
            return False
        self._take(match.end())
        self._argue('"')
        self._state = self._in_body
        return True

    def _in_quotes(self) -> bool:
        """Read a string between JSON's own quotes."""
        text = self._text
        match = _IN_QUOTES.search(text, self._at)
        if match is None:
            self._argue(self._take(len(text)))
            return False
        if match[0] == '"':
            self._argue(self._take(match.end()))
            self._state = self._in_body
            return True
        if match.end() == len(text):
            self._argue(self._take(match.start()))
            return False
        self._argue(self._take(match.end() + 1))
        return True
