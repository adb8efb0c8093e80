"""Kept prompts as they are shown: the list, one with all that is kept of it, and two side by side."""

from __future__ import annotations

from collections.abc import Sequence

from nbengine.frontend.prompts.prompt import Prompt
from nbengine.frontend.prompts.store import Listed
from nbengine.magics.answers.diff import diff_html, diff_text, word_diff
from nbengine.magics.answers.kept_view import brief, quotation
from nbengine.widgets.words import PLAIN, PROSE, age, count, harmless, joined, muted, table

_EMPTY_FIELD = "…"


def listing(rows: Sequence[Listed]) -> dict[str, str]:
    """List versions of prompts as a MIME bundle."""
    header = ["PROMPT", "VERSION", "VARIABLES", "EXAMPLES", "RUNS", "LAST USED", "KEPT", "BEGINS WITH"]
    plain, html = table([_row(each) for each in rows], header)
    return {"text/plain": plain, "text/html": f"<div {PLAIN}>{html}</div>"}


def prompt_bundle(listed: Listed) -> dict[str, str]:
    """Show a version of a prompt: when it was kept, its variables, its text and its examples."""
    prompt = listed.prompt
    lines = [line for line in (_about(listed), _variables(prompt)) if line]
    quoted, quoted_html = quotation(prompt.source)
    plain = [*map(harmless, lines), quoted]
    html = ["".join(map(muted, lines)), quoted_html]
    if prompt.examples:
        heading = f"{count(len(prompt.examples), 'example')} before the last message:"
        cells = [[brief(each.question), brief(each.answer)] for each in prompt.examples]
        examples, examples_html = table(cells, ["QUESTION", "ANSWER"])
        plain += [heading, examples]
        html += [muted(heading), f"<div {PLAIN}>{examples_html}</div>"]
    return {"text/plain": "\n".join(plain), "text/html": "".join(html)}


def difference_bundle(old: Prompt, new: Prompt) -> dict[str, str]:
    """Show in what one version differs from another, written as the cells that would keep them."""
    line = f"{old.reference} → {new.reference}"
    before, after = as_text(old), as_text(new)
    if before == after:
        line += ": the same text"
    parts = word_diff(before, after)
    return {
        "text/plain": harmless(f"{line}\n{diff_text(parts)}"),
        "text/html": muted(line) + f'<div {PLAIN} style="{PROSE}">{diff_html(parts)}</div>',
    }


def as_text(prompt: Prompt) -> str:
    """Write a prompt with all that belongs to it as a text."""
    lines = [f"default {name}={value}" for name, value in sorted(prompt.defaults.items())]
    lines += ["no roles"] if prompt.raw else []
    lines += [f"example {each.question!r} {each.answer!r}" for each in prompt.examples]
    return "\n".join([*lines, *([""] if lines else []), prompt.source])


def usage(prompt: Prompt) -> str:
    """Write the line that asks with a prompt: `%generate @capital country=…`."""
    values = "".join(f" {name}={_EMPTY_FIELD}" for name in prompt.variables if name not in prompt.defaults)
    return f"%generate @{prompt.name}{values}"


def _row(listed: Listed) -> list[str]:
    prompt = listed.prompt
    sign = "" if listed.is_current else " (older)"
    return [
        prompt.name,
        f"{prompt.version}{sign}",
        ", ".join(prompt.variables) or "none",
        str(len(prompt.examples) or ""),
        f"{listed.num_runs:,}",
        "" if listed.last_used is None else f"{age(listed.last_used)} ago",
        f"{age(prompt.time)} ago" if listed.is_kept else "in this kernel alone",
        brief(prompt.sections[-1].text),
    ]


def _about(listed: Listed) -> str:
    prompt = listed.prompt
    return joined(
        f"prompt {prompt.reference}{'' if listed.is_current else ', an older version'}",
        f"kept {age(prompt.time)} ago" if listed.is_kept else "in this kernel alone",
        f"in {prompt.notebook}" if prompt.notebook else "",
        f"{count(listed.num_runs, 'run')}"
        + ("" if listed.last_used is None else f", the last {age(listed.last_used)} ago"),
        "no roles" if prompt.raw else "",
    )


def _variables(prompt: Prompt) -> str:
    words = [
        f"{name} (default {prompt.defaults[name]!r})" if name in prompt.defaults else name
        for name in prompt.variables
    ]
    return joined(f"variables: {', '.join(words) or 'none'}", usage(prompt))


def kept_line(prompt: Prompt, reason: str) -> str:
    """Say what has been kept, and why it lives in this kernel alone if there is a `reason`."""
    variables = f" with {', '.join(prompt.variables)}" if prompt.variables else ""
    where = f" (in this kernel alone: {reason})" if reason else ""
    return harmless(f"prompt {prompt.reference}{variables} is kept{where}; {usage(prompt)} asks with it")
