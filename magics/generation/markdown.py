"""This module makes Markdown from a model safe for a notebook that trusts its own outputs."""

from __future__ import annotations

import re
from html import escape

_TAG_START = re.compile(r"<(?=[A-Za-z/!?])")
_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}(?=[^`\n]*$)|~{3,}).*")
_CODE_SPAN = re.compile(r"(?<![`\\])(?P<ticks>`+)(?!`)(?P<code>[^\n]+?)(?<!`)(?P=ticks)(?!`)")


def harmless_markdown(text: str) -> str:
    """Return Markdown that looks the same, but in which no HTML of the text is live.

    A frontend renders raw HTML in the Markdown of a trusted notebook, scripts included, and a model may have
    been told to write some. So each `<` that could begin a tag becomes `&lt;`; code that contains one is
    written as `<code>` or `<pre>`, because frontends differ in what they take for code. Streaming may cut the
    text anywhere.
    """
    if not _TAG_START.search(text):
        return text
    return "\n".join(_safe_blocks(text.split("\n")))


def closed_markdown(text: str) -> str:
    """Close a fence that is still open, so that something else can follow the Markdown."""
    lines = text.split("\n")
    position = 0
    while position < len(lines):
        opening = _FENCE.fullmatch(lines[position])
        if opening is not None:
            position = _closing_fence(lines, position + 1, opening["fence"])
            if position == len(lines):
                return f"{text}\n{opening['indent']}{opening['fence']}"
        position += 1
    return text


def fenced(code: str, language: str = "") -> str:
    """Make a fenced code block, with a fence that the code does not contain."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def unfenced(text: str) -> tuple[str, str]:
    """Take code out of its fence, where the whole text is one fenced block: (code, language).

    The closing fence may be missing, as it is while the answer streams.
    """
    match = re.match(r"\s*(?P<fence>`{3,}|~{3,})(?P<language>[\w+#.-]*)[^\n]*\n(?P<rest>.*)", text, re.DOTALL)
    if match is None:
        return text, ""
    code, closing, after = match["rest"].partition("\n" + match["fence"])
    if closing and after.strip():
        return text, ""
    return code.removesuffix(match["fence"]), match["language"]


def _safe_blocks(lines: list[str]) -> list[str]:
    safe: list[str] = []
    position = 0
    in_mathematics = False
    while position < len(lines):
        line = lines[position]
        opening = _FENCE.fullmatch(line)
        if opening is None:
            safe.append(_safe_line(line, in_mathematics))
            in_mathematics ^= line.count("$$") % 2 == 1
            position += 1
            continue
        end = _closing_fence(lines, position + 1, opening["fence"])
        block = lines[position : end + 1]
        if _TAG_START.search("\n".join(block)):
            block = _as_pre(lines[position + 1 : end], opening["indent"])
        safe.extend(block)
        position = end + 1
    return safe


def _closing_fence(lines: list[str], start: int, fence: str) -> int:
    for position in range(start, len(lines)):
        line = lines[position].strip()
        if len(line) >= len(fence) and not line.strip(fence[0]):
            return position
    return len(lines)


def _as_pre(code: list[str], indent: str) -> list[str]:
    # Markdown is off inside <pre>; a dollar sign as an entity does not begin mathematics either.
    lines = [escape(line.removeprefix(indent)).replace("$", "&#36;") for line in code]
    lines[:1] = ["<pre><code>" + "".join(lines[:1])]
    lines[-1] += "</code></pre>"
    return [indent + line for line in lines]


def _safe_line(line: str, in_mathematics: bool) -> str:
    parts: list[str] = []
    position = 0
    for span in _CODE_SPAN.finditer(line):
        if _TAG_START.search(span["code"]):
            parts.append(_without_tags(line, position, span.start(), in_mathematics))
            parts.append(f"<code>{escape(span['code'])}</code>")
            position = span.end()
    parts.append(_without_tags(line, position, len(line), in_mathematics))
    return "".join(parts)


def _without_tags(line: str, start: int, end: int, in_mathematics: bool) -> str:
    def replacement(match: re.Match[str]) -> str:
        between_dollars = line.count("$", 0, start + match.start()) % 2 == 1
        return "< " if in_mathematics or between_dollars else "&lt;"

    return _TAG_START.sub(replacement, line[start:end])
