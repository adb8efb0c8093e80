"""Calls as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from nbengine.frontend.parsing.tools.json_calls import JsonCallParser


class HermesToolParser(JsonCallParser):
    """The parser of a JSON object between tags, one for each call."""

    begins = ("<tool_call>",)
    ends = ("</tool_call>",)

    def _begin_call(self, marker: str) -> None:
        del marker
        self._state = self._behind_marker

    def _behind_marker(self) -> bool:
        self._take(self._behind_spaces(self._at))
        if self._at == len(self._text):
            return False
        self._read_call()
        return True
