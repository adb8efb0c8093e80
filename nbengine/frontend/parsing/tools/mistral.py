"""Calls as Mistral writes them: a list behind `[TOOL_CALLS]`, or a marker, a name and arguments for each."""

from __future__ import annotations

import re

from nbengine.frontend.parsing.schemas import ToolTypes
from nbengine.frontend.parsing.tools.base import MOST_NAME, random_characters
from nbengine.frontend.parsing.tools.json_lists import JsonListParser

_NAMED = re.compile(r"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
ID_LENGTH = 9
"""Mistral's templates refuse ids of another length."""


class MistralToolParser(JsonListParser):
    """The parser of `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and of `[TOOL_CALLS]name[ARGS]{...}`."""

    begins = ("[TOOL_CALLS]",)

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._is_named = False
        """The name stands in front of the arguments' object, not in an object with them."""

    @classmethod
    def markers(cls) -> frozenset[str]:
        return frozenset((*cls.begins, "[ARGS]", "[CALL_ID]"))

    def _new_id(self) -> str:
        return random_characters(ID_LENGTH)

    def _read_other(self) -> None:
        self._is_named = self._text[self._at] != "{"
        if self._is_named:
            self._state = self._in_name
        else:
            self._read_call()

    def _in_name(self) -> bool:
        """Read a name up to the bracket of the arguments."""
        brace = self._text.find("{", self._at)
        if brace < 0 and len(self._text) - self._at <= MOST_NAME:
            return False
        named = None if brace < 0 else _NAMED.fullmatch(self._text, self._at, brace)
        if named is None or brace - self._at > MOST_NAME:
            self._fail("no name with arguments follows its beginning")
            return True
        self._take(brace)
        self._start(named[1])
        self._read_arguments()
        return True

    def _behind_arguments(self) -> None:
        if self._is_named and not self._is_list:
            self._end()
        else:
            super()._behind_arguments()
