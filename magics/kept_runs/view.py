"""Runs as they are shown: a list, one with all that is kept of it, and the settings in which two differ."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nbengine.magics.answers.kept_view import Listed, brief, list_html, quotation
from nbengine.magics.generation.render import answers_bundle
from nbengine.outputs import CompletionOutput
from nbengine.widgets.words import age, count, harmless, joined, muted, seconds, table

Row = Mapping[str, Any]
_ENDINGS = {"stop": "complete", "length": "stopped at the limit", "abort": "ended early", "error": "failed"}
_LONGEST_SETTING = 200


def listing(rows: Sequence[Row]) -> dict[str, str]:
    """List runs, in the order of `rows`, as a MIME bundle."""
    header = ["RUN", "ASKED", "", "PROMPT", "ANSWER", "TOKENS", "END", "MODEL", "ENGINE", "NOTE"]
    plain, _ = table([_plain_row(row) for row in rows], header)
    html = list_html(
        ("RUN", "ASKED, END, MODEL"),
        [Listed(row["run"], _signs(row), row["prompt"], row["text"], _about(row)) for row in rows],
    )
    return {"text/plain": plain, "text/html": html}


def run_bundle(row: Row, output_format: str) -> dict[str, str]:
    """Show a run: when and of which model it was asked, its settings and prompt, the answer and its figures."""
    lines = [_when(row), _of_model(row), _settings_line(row["settings"])]
    if row["prompt_name"]:
        values = _settings_line(row["prompt_values"])
        lines.append(f"prompt {kept_prompt(row)}{f' with {values}' if values else ''}")
    if row["varied"]:
        lines.append(f"in a comparison: {_settings_line(row['varied'])}")
    if row["scores"]:
        lines.append(f"scores: {_settings_line(row['scores'])}")
    if row["note"]:
        lines.append(f"note: {row['note']}")
    quoted, quoted_html = quotation(row["prompt"])
    outputs = row["outputs"] or [{"text": row["text"]}]
    answers = [CompletionOutput(index, each["text"], []) for index, each in enumerate(outputs)]
    bundle = answers_bundle(answers, output_format, figures(row))
    plain = "\n".join([*map(harmless, lines), quoted, bundle.pop("text/plain")])
    ((kind, answer),) = bundle.items()
    head = "".join(map(muted, lines)) + quoted_html
    return {"text/plain": plain, kind: f"{head}\n\n{answer}" if kind == "text/markdown" else head + answer}


def figures(row: Row) -> str:
    """Make the line under a run's answer: its end, tokens, speed, first token and reuse."""
    metrics = row["metrics"]
    rate, first = metrics.get("tokens_per_second"), metrics.get("ttft")
    return joined(
        ending(row),
        count(row["tokens"], "token"),
        f"{rate:,.1f} tok/s" if rate else "",
        "" if first is None else f"first token after {seconds(first)}",
        f"{row['cached_tokens']} of {row['prompt_tokens']} prompt tokens reused"
        if row["cached_tokens"]
        else "",
    )


def ending(row: Row) -> str:
    """Say in words how a run ended."""
    words = _ENDINGS.get(row["finish_reason"], str(row["finish_reason"]))
    return f"{words}: {row['error']}" if row["error"] else words


def differences(old: Row, new: Row) -> str:
    """Name the model, the engine and the settings in which two runs differ; empty if they differ in none."""
    both = [
        {**{name: row[name] for name in ("model", "model_version", "engine")}, **row["settings"]}
        for row in (old, new)
    ]
    names = list(dict.fromkeys([*both[0], *both[1]]))
    changed = [
        f"{name} {_value(both[0].get(name))} → {_value(both[1].get(name))}"
        for name in names
        if both[0].get(name) != both[1].get(name)
    ]
    return ", ".join(changed)


def kept_prompt(row: Row) -> str:
    """Name the version of the kept prompt that a run was asked with; empty if there was none."""
    return f"@{row['prompt_name']}:{row['prompt_version']}" if row["prompt_name"] else ""


def _when(row: Row) -> str:
    asked = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
    pinned = ", pinned" if row["pinned"] else ""
    where = f", in {row['notebook']}" if row["notebook"] else ""
    return f"run {row['run']}{pinned}, asked at {asked}, {age(row['time'])} ago{where}"


def _of_model(row: Row) -> str:
    version = f" ({row['model_version']})" if row["model_version"] else ""
    return f"model {row['model']}{version}, engine {row['engine']!r}, nbengine {row['nbengine']}"


def _settings_line(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in settings.items() if value is not None)


def _value(value: object) -> str:
    if value is None:
        return "none"
    text = f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SETTING else text[: _LONGEST_SETTING - 1] + "…"


def _signs(row: Row) -> str:
    return "pinned" if row["pinned"] else ""


def _plain_row(row: Row) -> list[str]:
    return [
        str(row["run"]),
        f"{age(row['time'])} ago",
        _signs(row),
        brief(row["prompt"]),
        brief(row["text"]),
        f"{row['tokens']:,}",
        brief(ending(row)),
        brief(row["model"]),
        harmless(row["engine"]),
        brief(joined(kept_prompt(row), row["note"])),
    ]


def _about(row: Row) -> list[str]:
    return [
        f"{age(row['time'])} ago",
        f"{ending(row)}, {count(row['tokens'], 'token')}",
        f"{row['model']}, engine {row['engine']}",
        *([kept_prompt(row)] if row["prompt_name"] else []),
        *([f"note: {row['note']}"] if row["note"] else []),
    ]
