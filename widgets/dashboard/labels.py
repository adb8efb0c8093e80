"""The words that tell a person which request it is: the end of what was asked, and the newest of the answer."""

from __future__ import annotations

import re

MOST_LABEL = 120
"""The most characters of a label, of a request's newest output, too."""
_TEMPLATE = re.compile(
    r"<\|[^<>|\n]{1,40}\|>|<[｜][^<>\n]{1,40}[｜]>|</?s>|\[/?(?:INST|SYS)\]|<</?SYS>>|<(?:start|end)_of_turn>"
)
"""The marks with which chat templates divide messages."""
_ROLES = frozenset(("assistant", "user", "model", "system", "tool", "<think>", "</think>"))


def last_words(text: str) -> str:
    """Return the end of the last message in a rendered prompt, without the marks of a chat template."""
    lines = [line.strip() for line in _TEMPLATE.sub("\n", text).splitlines()]
    kept = [line for line in lines if line and line.casefold() not in _ROLES]
    return tail(kept[-1]) if kept else ""


def tail(text: str) -> str:
    """Return the end of a text, in one line."""
    line = " ".join(text[-4 * MOST_LABEL :].split())
    return line if len(line) <= MOST_LABEL else "…" + line[1 - MOST_LABEL :]
