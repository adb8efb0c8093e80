"""One run as it is kept, the limits of the store, and the choice of runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from nbengine.checks import require

JSON_COLUMNS = ("settings", "varied", "metrics", "outputs", "messages", "prompt_values", "scores", "judged")
"""The columns that hold JSON."""


@dataclass(frozen=True, slots=True)
class Run:
    """A prompt that has ended, with all that is kept of it; each field is a column of the store.

    `time` is the `time.time()` at which it was asked. Of several completions `text` is the first one's, and
    `outputs` has all of them.
    """

    time: float
    kind: str
    """"generate", "comparison" or "chat"."""
    engine: str
    model: str
    model_version: str
    """The model's revision, or a digest of its files' sizes and times; empty where neither is known."""
    nbengine: str
    prompt: str
    """The prompt as the user wrote it, with the notebook's variables put in."""
    text: str
    finish_reason: str | None
    error: str = ""
    """The error that ended it; empty if none did."""
    tokens: int = 0
    """The number of new tokens of all completions."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters by name, and what went into the prompt: `chat`, `system`, `think`, `template`, `tools`."""
    varied: Mapping[str, Any] = field(default_factory=dict)
    """The values that distinguish the run within its comparison, by the name of their axis."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Seconds and counts, see `metrics_of`."""
    outputs: Sequence[Mapping[str, Any]] = ()
    """The completions, where there are several: `text`, `finish_reason` and `tokens` of each."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The messages that the chat template got; none where the prompt went to the model as it is."""
    comparison: str = ""
    """A name that all runs of one comparison share."""
    notebook: str = ""
    cell: str = ""
    execution: str = ""
    """The id of the cell's execution."""
    question: str = ""
    """A digest of all that its answer depends on, where a comparison may be resumed; see `question_of`."""
    prompt_name: str = ""
    """The name of the kept prompt that was asked with; empty where there was none."""
    prompt_version: int | None = None
    prompt_values: Mapping[str, str] = field(default_factory=dict)
    """The values of the kept prompt's fields, by what stands in their braces."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """The scores of its answer in a comparison, by name; of several completions a list each, with None for those without
    one."""
    judged: Mapping[str, str] = field(default_factory=dict)
    """The choices of a judge, by a digest of each question."""

    def values(self) -> dict[str, Any]:
        """Return what is stored in each column, and under `size` the number of characters of all texts."""
        row = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in JSON_COLUMNS:
            row[name] = json_text(row[name])
        row = {name: storable(value) if isinstance(value, str) else value for name, value in row.items()}
        return {**row, "size": sum(len(value) for value in row.values() if isinstance(value, str))}


@dataclass(eq=False, slots=True)
class KeptRun:
    """A run that is to be kept; `number` is its number in the store once it is written there."""

    number: int | None = None


@dataclass(frozen=True, slots=True)
class FoundScores:
    """The scores of a run's answer, which are found after its end; both fields are as in `Run`."""

    scores: Mapping[str, Any]
    judged: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the store, beyond which the oldest runs go that are not pinned.

    `max_days` is None where runs are kept for ever.
    """

    max_days: int | None = 365
    max_mb: int = 500


@dataclass(frozen=True, slots=True)
class RunFilter:
    """The choice of runs: all conditions that are given must hold."""

    numbers: tuple[int, ...] | None = None
    find: str | None = None
    """A text in the prompt, an answer or the note, whatever the case of its letters."""
    model: str | None = None
    """A part of the model's name, whatever the case of its letters."""
    engine: str | None = None
    notebook: str | None = None
    cell: str | None = None
    execution: str | None = None
    comparison: str | None = None
    prompt_name: str | None = None
    """The name of the kept prompt that was asked with."""
    prompt_version: int | None = None
    since: float | None = None
    """A `time.time()`: runs that were asked then or later."""
    errors: bool = False
    """Only runs that an error has ended."""
    pinned: bool = False
    last: int | None = None
    """The most runs, the latest of those that fit."""

    def __post_init__(self) -> None:
        last = self.last
        require("last", last, last is None or 1 <= last < 2**63, "a whole number, at least 1, or None")


def question_of(run: Run) -> str:
    """Return a digest of the model, the prompt, the settings and the place in a comparison: runs that share it have
    asked the same."""
    parts = (run.model, run.model_version, run.prompt, run.settings, run.varied, run.messages)
    return hashlib.sha256(storable(json_text(parts)).encode()).hexdigest()


def json_text(value: object) -> str:
    """Write a value as JSON, with the texts of objects that are none in their place."""
    return json.dumps(value, default=_as_text, ensure_ascii=False)


def storable(text: str) -> str:
    """Return a text that a file in UTF-8 can hold: half of a surrogate pair becomes an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _as_text(value: object) -> str:
    """Write what is no JSON, such as an object of the user's."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 (the user's class may raise anything, and the run is kept all the same)
        return f"<{type(value).__name__}>"
