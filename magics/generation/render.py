"""The appearance of an answer: a MIME bundle, and the line under it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape

from nbengine.magics.generation.markdown import closed_markdown, fenced, harmless_markdown, unfenced
from nbengine.magics.generation.result import UNREADABLE_JSON, GenerationResult
from nbengine.outputs import CompletionOutput
from nbengine.widgets.grid.html import side_by_side
from nbengine.widgets.stop.buttons import mark
from nbengine.widgets.words import MUTED, PLAIN, PROSE, count, joined, muted, seconds

_JSON_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"?|\{\s*\}|\[\s*\]|[][{}:,]|[^][{}:,"\s]+', re.DOTALL)
"""Strings, the last of which may lack its end, brackets, and the text between them except white space."""
_DEEPEST_INDENTATION = 100
"""The deepest indented level: without a limit, blanks would grow with the square of the text's length."""
LONG_PROMPT_SECONDS = 1.0
"""The shortest time of reading a prompt, in seconds, of which a cell speaks."""
_HEADINGS = {
    "text/html": f'<div style="{MUTED}">{{}}.</div>',
    "text/markdown": "**{}.**\n\n",
}
SIGN = "▍"
"""The sign behind a text that is being written."""
CARET = f'<span aria-hidden="true" style="opacity:0.6">{SIGN}</span>'
"""The sign in HTML."""
_ONLY_MARKS = re.compile(r"[ \t]*[-`~=*_#|:+.>$]+[ \t]*")
"""A line of Markdown that a sign behind it could make another one of, such as the end of a fence."""
_CODE = f"{PROSE};margin:0;font-family:var(--jp-code-font-family,monospace)"


_LATE = (
    "<style>@keyframes nbe-late { from, to { visibility: hidden } }</style>"
    f'<div class="nbe-late" style="{MUTED};animation:nbe-late 20s">'
    "nothing new for a while: after this page was loaded again, <code>%engine recover</code> shows the answer</div>"
)
"""A line below an answer that streams: the style hides it for as long as the answer is replaced by a later one.

A page that is loaded again no longer gets what a cell of before shows, and keeps the answer as it was.
"""


def growing(bundle: Mapping[str, str], key: str) -> dict[str, str]:
    """Add to a MIME bundle what an answer has while it is being written: the mark `key`, and a line for later."""
    plain, *rich = bundle.items()
    return dict([plain, *((kind, f"{text}\n\n{_LATE}{mark(key)}") for kind, text in rich)])


def streaming_bundle(
    answers: Sequence[CompletionOutput], output_format: str, footer: str = "", key: str = ""
) -> dict[str, str]:
    """Make the MIME bundle of completions that are still being written, with the mark `key`."""
    return growing(answers_bundle(answers, output_format, footer, complete=False), key)


def answer_bundle(
    text: str, output_format: str, footer: str = "", *, complete: bool = True
) -> dict[str, str]:
    """Make the MIME bundle of an answer: `text/plain`, and `text/html` or `text/markdown` beside it.

    `complete` is False while the answer streams, when JSON cannot be parsed yet.
    """
    caret = "" if complete else CARET
    if output_format == "markdown":
        shown = text if complete or _ONLY_MARKS.fullmatch(text.rpartition("\n")[2]) else text + SIGN
        rich = {"text/markdown": closed_markdown(harmless_markdown(shown)) + _markdown_footer(footer)}
    elif output_format == "code":
        text, language = unfenced(text)
        shown = text if complete else text + SIGN
        rich = {"text/markdown": harmless_markdown(fenced(shown, language)) + _markdown_footer(footer)}
    elif output_format == "json":
        text, note = pretty_json(text) if complete else (indented_json(text), "")
        footer = joined(footer, note)
        rich = {"text/html": f'<pre {PLAIN} style="{_CODE}">{escape(text)}{caret}</pre>{muted(footer)}'}
    else:
        rich = {"text/html": f'<div {PLAIN} style="{PROSE}">{escape(text)}{caret}</div>{muted(footer)}'}
    plain = f"{text}\n\n[{footer}]" if footer else text
    return {"text/plain": plain, **rich}


def answers_bundle(
    answers: Sequence[CompletionOutput], output_format: str, footer: str = "", *, complete: bool = True
) -> dict[str, str]:
    """Make the MIME bundle of a request's completions; each of several has a numbered heading."""
    if len(answers) < 2:
        return answer_bundle(answers[0].text if answers else "", output_format, footer, complete=complete)
    plain, rich = [], []
    for answer in answers:
        bundle = answer_bundle(answer.text, output_format, complete=complete)
        plain.append(f"{answer.index + 1}.\n{bundle.pop('text/plain')}")
        ((kind, shown),) = bundle.items()
        rich.append(_HEADINGS[kind].format(answer.index + 1) + shown)
    if footer:
        plain.append(f"[{footer}]")
    if kind == "text/html":
        return {"text/plain": "\n\n".join(plain), kind: side_by_side(rich) + muted(footer)}
    return {"text/plain": "\n\n".join(plain), kind: "\n\n".join(rich) + _markdown_footer(footer)}


def pretty_json(text: str) -> tuple[str, str]:
    """Indent JSON, also inside a fence, and return (text, complaint); text that is not JSON stays."""
    code, _ = unfenced(text)
    try:
        pretty = json.dumps(json.loads(code), indent=2, ensure_ascii=False)
    except json.JSONDecodeError as error:
        return text, f"not valid JSON: {error}"
    except UNREADABLE_JSON as error:
        return text, f"not readable JSON: {error}"
    # Half of a surrogate pair cannot be sent to a frontend, so it stays an escape.
    return pretty.encode("utf-8", "backslashreplace").decode(), ""


def indented_json(text: str) -> str:
    """Indent JSON whose end is still missing, as `pretty_json` does with complete JSON; other text stays."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    parts: list[str] = []
    depth = 0
    for match in _JSON_PARTS.finditer(text):
        part = match[0]
        if part[0] in "{[" and len(part) > 1:
            parts += part[0], part[-1]
        elif part[0] in "{[":
            depth += 1
            parts += part[0], _new_line(depth)
        elif part[0] in "}]":
            depth -= 1
            parts += _new_line(depth), part
        elif part == ",":
            parts += part, _new_line(depth)
        else:
            parts.append(": " if part == ":" else part)
    return "".join(parts).rstrip()


def _new_line(depth: int) -> str:
    return "\n" + "  " * min(depth, _DEEPEST_INDENTATION)


def prompt_line(result: GenerationResult) -> str:
    """Say how much of the prompt has been read; empty where that takes no time, and once the answer has begun."""
    progress = result.metrics.prompt_progress
    if progress is None or any(completion.token_ids for completion in result.outputs):
        return ""
    whole = progress.seconds + (progress.seconds_left or 0.0)
    return str(progress) if whole >= LONG_PROMPT_SECONDS else ""


def footer_of(result: GenerationResult) -> str:
    """Make the quiet line under an answer: tokens, speed, reuse and its end, which is first if it was early.

    The line is empty if no token came.
    """
    num_tokens = sum(len(completion.token_ids) for completion in result.outputs)
    if not num_tokens:
        return ""
    metrics = result.metrics
    early = _early_ending(result)
    parts = [early, count(num_tokens, "token")]
    if metrics.tokens_per_second:
        parts.append(f"{metrics.tokens_per_second:,.1f} tok/s")
    if (surprise := perplexity(result)) is not None:
        parts.append(f"perplexity {surprise:.3g}")
    if metrics.time_to_first_token is not None:
        parts.append(f"first token after {seconds(metrics.time_to_first_token)}")
    if result.num_cached_tokens:
        parts.append(f"{result.num_cached_tokens} of {result.num_prompt_tokens} prompt tokens reused")
    if metrics.num_preemptions:
        parts.append(f"preempted {count(metrics.num_preemptions, 'time')}")
    parts.append("" if early else _ending(result))
    if result.names_ranks and metrics.data_parallel_ranks:
        ranks = sorted(metrics.data_parallel_ranks)
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
    return joined(*parts)


def perplexity(result: GenerationResult) -> float | None:
    """Return how many equally likely tokens the model has chosen from on average; None for several answers, and
    where log probabilities were not asked for."""
    if len(result.outputs) != 1:
        return None
    (answer,) = result.outputs
    known = answer.cumulative_logprob is not None and math.isfinite(answer.cumulative_logprob)
    if not known or not answer.token_ids or answer.cumulative_logprob is None:
        return None
    # Beyond this the number says nothing, and has no digits to show.
    return math.exp(min(700.0, -answer.cumulative_logprob / len(answer.token_ids)))


def stream_line(result: GenerationResult) -> str:
    """Make the quiet line under an answer that is being written: its tokens and its speed so far."""
    num_tokens = sum(len(completion.token_ids) for completion in result.outputs)
    if not num_tokens:
        return ""
    rate = result.metrics.tokens_per_second
    return joined(count(num_tokens, "token"), f"{rate:,.1f} tok/s" if rate else "")


def branch_footer(own: GenerationResult, error: str = "") -> str:
    """Make the line under a branch, whose own request may have brought nothing but an end."""
    ending = _early_ending(own) or _ending(own)
    return joined(footer_of(own) or (ending if own.finished and not error else ""), error)


def _ending(result: GenerationResult) -> str:
    """Say how an answer ended of itself; of several, say only that they ended."""
    if not result.finished:
        return ""
    stop = result.stop_reason if len(result.outputs) == 1 else None
    if stop is None:
        return "finished"
    return f"stopped at {stop!r}" if isinstance(stop, str) else f"stopped at token {stop}"


def _early_ending(result: GenerationResult) -> str:
    reasons = [completion.finish_reason for completion in result.outputs]
    if "abort" in reasons:
        return "ended early"
    at_limit = reasons.count("length")
    if len(reasons) > 1 and at_limit:
        return f"{at_limit} of {len(reasons)} stopped at the limit"
    return "stopped at the limit" if at_limit else ""


def _markdown_footer(footer: str) -> str:
    return f"\n\n{muted(footer)}" if footer else ""
