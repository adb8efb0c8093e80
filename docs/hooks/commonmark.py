"""Make text that is written for a code host, in CommonMark, mean the same to the site's Markdown."""

from __future__ import annotations

import re

_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_BEGINS = re.compile(r"(?:[-*+]|\d+\.) |\|")
"""The beginning of an item of a list, or of a row of a table."""


def spaced(text: str) -> str:
    """Put an empty line before each list and table.

    A code host begins one in any line. Python-Markdown takes it for a part of the paragraph, or of the code
    block, that stands directly above it.
    """
    lines: list[str] = []
    fence = ""
    block = ""  # the first line of what stands above without an empty line between
    for line in text.splitlines():
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not line.strip(" `~"):
                fence, block = "", line
        elif found:
            fence = found[1]
        elif not line.strip():
            block = ""
        else:
            if _BEGINS.match(line) and block and not _same_kind(block, line):
                lines.append("")
                block = ""
            block = block or line
        lines.append(line)
    return "\n".join(lines) + "\n"


def _same_kind(block: str, line: str) -> bool:
    begun = _BEGINS.match(block)
    return begun is not None and (begun[0] == "|") == line.startswith("|")
