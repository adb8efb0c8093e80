"""Answers that are shown again: the heading above one, and the list of all, as (plain text, HTML)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from nbengine.ipc.transcripts import shortened
from nbengine.magics.answers.kept import Answer
from nbengine.widgets.words import MUTED, PLAIN, age, count, harmless, muted, table

_CELL_WIDTH = 40
# A border that is transparent is a line where the reader's system forces its colours, and takes the rows' grounds away.
_CELL = "text-align:left;vertical-align:top;overflow-wrap:anywhere;border-top:1px solid transparent"


def heading(answer: Answer) -> tuple[str, str]:
    """Describe the request and its end: the time, the engine, the prompt and the ending."""
    asked = time.strftime("%H:%M:%S", time.localtime(answer.submitted))
    line = f"asked at {asked}, {age(answer.submitted)} ago, of engine {answer.engine!r} · {answer.ending}"
    quoted, html = quotation(shortened(answer.result.prompt))
    return f"{harmless(line)}\n{quoted}", muted(line) + html


def quotation(prompt: str) -> tuple[str, str]:
    """Quote a prompt, as (plain text, HTML)."""
    quoted = "\n".join(f"> {part}" for part in harmless(prompt).splitlines())
    html = (
        f'<blockquote {PLAIN} style="white-space:pre-wrap;overflow-wrap:anywhere;margin:0.3em 0;padding-left:0.7em;'
        f'border-left:3px solid var(--jp-border-color1,#bbb)">{escape(prompt)}</blockquote>'
    )
    return quoted, html


def listing(answers: Sequence[Answer]) -> tuple[str, str]:
    """List all answers, numbered as `%engine recover N` takes them."""
    header = ["#", "ASKED", "", "PROMPT", "ANSWER", "TOKENS", "END", "ENGINE", "ID"]
    plain, _ = table([_plain_row(number, answer) for number, answer in enumerate(answers, 1)], header)
    rows = [_listed(number, answer) for number, answer in enumerate(answers, 1)]
    return plain, list_html(("#", "ASKED, END, ID"), rows)


@dataclass(frozen=True)
class Listed:
    """A line of a list of answers; `sign` stands before the prompt, `about` has a line each."""

    number: int
    sign: str
    prompt: str
    text: str
    about: Sequence[str]


def list_html(names: tuple[str, str], rows: Iterable[Listed]) -> str:
    """Render a list of answers; `names` head the numbers, and what is told about each answer."""
    columns = ((names[0], "3.5em"), ("PROMPT AND ANSWER", "auto"), (names[1], "34%"))
    head = "".join(f'<th style="{_CELL};width:{width}">{name}</th>' for name, width in columns)
    body = "".join(map(_html_row, rows))
    return f'<table {PLAIN} style="width:100%;table-layout:fixed"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _plain_row(number: int, answer: Answer) -> list[str]:
    return [
        str(number),
        f"{age(answer.submitted)} ago",
        "new" if answer.is_new else "",
        brief(answer.result.prompt),
        brief(answer.result.text),
        f"{answer.num_tokens:,}",
        harmless(answer.ending),
        answer.engine,
        harmless(answer.request_id),
    ]


def _listed(number: int, answer: Answer) -> Listed:
    about = (
        f"{age(answer.submitted)} ago of {answer.engine}",
        f"{answer.ending}, {count(answer.num_tokens, 'token')}",
        answer.request_id,
    )
    return Listed(number, "new" if answer.is_new else "", answer.result.prompt, answer.result.text, about)


def _html_row(row: Listed) -> str:
    prompt, text = brief(row.prompt, 3 * _CELL_WIDTH), brief(row.text, 3 * _CELL_WIDTH)
    sign = f"<b>{row.sign}</b> " if row.sign else ""
    cells = [
        f'<td style="{_CELL};white-space:nowrap">{row.number}</td>',
        f'<td style="{_CELL}">{sign}{escape(prompt)}<div style="{MUTED}">{escape(text)}</div></td>',
        f'<td style="{_CELL};{MUTED}">{"<br>".join(map(escape, row.about))}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def brief(text: str, width: int = _CELL_WIDTH) -> str:
    """Shorten a text to its beginning, in one line."""
    line = harmless(" ".join(text[: 4 * width].split()))
    return line if len(line) <= width else line[: width - 1] + "…"
