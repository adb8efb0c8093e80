"""Answers that are shown again: the heading above one, and the list of all, as (plain text, HTML)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from nbengine.ipc.transcripts import shortened
from nbengine.magics.answers.kept import Answer
from nbengine.widgets.words import MUTED, PLAIN, age, count, harmless, muted, table

_CELL_WIDTH = 40
_CELL = "text-align:left;vertical-align:top;overflow-wrap:anywhere"


def heading(answer: Answer) -> tuple[str, str]:
    """Describe the request and its end: the time, the engine, the prompt and the ending."""
    asked = time.strftime("%H:%M:%S", time.localtime(answer.submitted))
    line = f"asked at {asked}, {age(answer.submitted)} ago, of engine {answer.engine!r} · {answer.ending}"
    prompt = shortened(answer.result.prompt)
    quoted = "\n".join(f"> {part}" for part in harmless(prompt).splitlines())
    html = (
        f'{muted(line)}<blockquote {PLAIN} style="white-space:pre-wrap;overflow-wrap:anywhere;margin:0.3em 0;padding-left:0.7em;'
        f'border-left:3px solid var(--jp-border-color1,#bbb)">{escape(prompt)}</blockquote>'
    )
    return f"{harmless(line)}\n{quoted}", html


def listing(answers: Sequence[Answer]) -> tuple[str, str]:
    """List all answers, numbered as `%engine recover N` takes them."""
    header = ["#", "ASKED", "", "PROMPT", "ANSWER", "TOKENS", "END", "ENGINE", "ID"]
    plain, _ = table([_plain_row(number, answer) for number, answer in enumerate(answers, 1)], header)
    columns = (("#", "2.5em"), ("PROMPT AND ANSWER", "auto"), ("ASKED, END, ID", "34%"))
    head = "".join(f'<th style="{_CELL};width:{width}">{name}</th>' for name, width in columns)
    body = "".join(_html_row(number, answer) for number, answer in enumerate(answers, 1))
    return (
        plain,
        f'<table {PLAIN} style="width:100%;table-layout:fixed"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>',
    )


def _plain_row(number: int, answer: Answer) -> list[str]:
    return [
        str(number),
        f"{age(answer.submitted)} ago",
        "new" if answer.is_new else "",
        _brief(answer.result.prompt),
        _brief(answer.result.text),
        f"{answer.num_tokens:,}",
        harmless(answer.ending),
        answer.engine,
        harmless(answer.request_id),
    ]


def _html_row(number: int, answer: Answer) -> str:
    prompt, text = _brief(answer.result.prompt, 3 * _CELL_WIDTH), _brief(answer.result.text, 3 * _CELL_WIDTH)
    about = [
        f"{age(answer.submitted)} ago of {answer.engine}",
        f"{answer.ending}, {count(answer.num_tokens, 'token')}",
        answer.request_id,
    ]
    new = "<b>new</b> " if answer.is_new else ""
    cells = [
        f'<td style="{_CELL};white-space:nowrap">{number}</td>',
        f'<td style="{_CELL}">{new}{escape(prompt)}<div style="{MUTED}">{escape(text)}</div></td>',
        f'<td style="{_CELL};{MUTED}">{"<br>".join(map(escape, about))}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _brief(text: str, width: int = _CELL_WIDTH) -> str:
    """Shorten a text to its beginning, in one line."""
    line = harmless(" ".join(text[: 4 * width].split()))
    return line if len(line) <= width else line[: width - 1] + "…"
