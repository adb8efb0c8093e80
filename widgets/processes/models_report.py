"""The models of a machine as tables: those that lie on it, with what they need, and those that are worth fetching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nbengine.units import size
from nbengine.widgets.processes.fit_report import FitReport
from nbengine.widgets.words import harmless, table

_KEPT = ["MODEL", "WHERE", "ON DISK", "WHAT IT IS", "WEIGHTS", "KV CACHE", "SPEED", "HERE"]
_SUGGESTED = ["WORTH FETCHING", "PARAMETERS", "WEIGHTS", "SPEED", "HERE", "GOOD FOR"]
_LONGEST_PROBLEM = 160
_MEMORY_BOUND = 1000.0
"""Tokens per second beyond which other things than memory hold a small model up, so that no estimate is shown."""


@dataclass(frozen=True)
class ModelLine:
    """A model that lies on the machine; `fit` says what an engine of it would take, None where `problem` says why
    that is unknown."""

    name: str
    place: str
    kind: str
    num_bytes: int
    fit: FitReport | None
    problem: str = ""
    tokens_per_second: float | None = None
    """An estimate for one request; None where a token does not read all weights."""


@dataclass(frozen=True)
class SuggestedLine:
    """A model that is worth fetching, and how it would do on this machine."""

    name: str
    parameters: str
    weights_bytes: int
    good_for: str
    fits: bool
    is_kept: bool
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class ModelsReport:
    """All of it; `bytes_per_second` is how fast the memory of the device is read."""

    kept: Sequence[ModelLine]
    suggested: Sequence[SuggestedLine]
    device: str
    free_bytes: int
    bytes_per_second: float

    def tables(self) -> tuple[str, str]:
        """Render the report as (plain text, HTML)."""
        parts = []
        if self.kept:
            parts.append(table([_kept_row(line) for line in self.kept], _KEPT))
        else:
            empty = "No model lies on this machine yet."
            parts.append((empty, f"<p>{escape(empty)}</p>"))
        parts.append(table([_suggested_row(line) for line in self.suggested], _SUGGESTED))
        note = (
            f"{size(self.free_bytes)} of memory are free on {self.device}, which reads "
            f"{size(self.bytes_per_second)} of it a second. A token of one request reads all weights: the speed is "
            "estimated from that. `nbengine fetch MODEL` puts a model into a cache; `fit MODEL` says more about one."
        )
        parts.append((note, f"<p>{escape(note)}</p>"))
        return "\n\n".join(plain for plain, _ in parts), "".join(html for _, html in parts)

    def __str__(self) -> str:
        return self.tables()[0]

    def _repr_html_(self) -> str:
        return self.tables()[1]


def _kept_row(line: ModelLine) -> list[str]:
    fit = line.fit
    needs = ["", "", _speed(line.tokens_per_second)]
    outcome = f"no: {line.problem}"
    if fit is not None:
        needs[0] = size(fit.weights_bytes) if fit.weights_bytes else ""
        needs[1] = size(fit.kv_cache_bytes) if fit.kv_cache_bytes else ""
        outcome = f"fits, {fit.max_model_len:,} tokens" if fit.fits else f"no: {fit.problem}"
        if fit.advice:
            outcome += f"; try {fit.advice}"
    disk = size(line.num_bytes) if line.num_bytes else ""
    return [harmless(cell) for cell in (line.name, line.place, disk, line.kind, *needs, _cut(outcome))]


def _suggested_row(line: SuggestedLine) -> list[str]:
    here = "it is here" if line.is_kept else "fits" if line.fits else "does not fit"
    speed = _speed(line.tokens_per_second)
    return [line.name, line.parameters, size(line.weights_bytes), speed, here, line.good_for]


def _speed(tokens_per_second: float | None) -> str:
    if tokens_per_second is None or tokens_per_second > _MEMORY_BOUND:
        return ""
    return f"about {tokens_per_second:{',.0f' if tokens_per_second >= 10 else '.2g'}} tokens/s"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_PROBLEM else text[: _LONGEST_PROBLEM - 1] + "…"
