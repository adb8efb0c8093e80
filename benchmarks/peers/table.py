"""The rows of the comparison, made of the figures of all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.cases import Case
from peers.engines import OURS

MIB = 2**20


@dataclass(slots=True)
class Figures:
    """The figures of one case: a list for each engine, with one figure a round."""

    case: Case
    floor: float = 0.0
    engines: dict[str, list[float]] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    """The best number of threads of each engine that was tried with several."""
    unable: set[str] = field(default_factory=set)
    """The engines that have no way to take as many streams."""

    def median(self, engine: str) -> float:
        """Return the median of an engine's rounds."""
        return statistics.median(self.engines[engine])

    def share_of_floor(self, engine: str) -> float:
        """Return the part of what the machine can do that an engine reaches: 1 is the floor."""
        if self.case.more_is_better:
            return self.median(engine) / self.floor
        return self.floor / self.median(engine)

    def advantage(self, engine: str) -> float:
        """Return how many times better nbengine is than an engine: the median of the ratios of the rounds,
        in which the two ran next to each other."""
        pairs = zip(self.engines[OURS], self.engines[engine], strict=True)
        if self.case.more_is_better:
            return statistics.median(ours / theirs for ours, theirs in pairs)
        return statistics.median(theirs / ours for ours, theirs in pairs)


def row(figures: Figures, engines: Sequence[str], missing: Mapping[str, str]) -> dict[str, Any]:
    """Make the row of a case: a cell for each engine, with its share of the floor, then the ratios.

    An engine that is missing, that cannot take as many streams, or whose runs of this case failed, says so in its
    cell. The last ratio is that to the best of all others.
    """
    case = figures.case
    cells: dict[str, Any] = {"what": case.name, "unit": case.unit, "floor": figures.floor}
    for engine in engines:
        if engine in missing:
            cells[engine] = "missing"
        elif engine in figures.unable:
            cells[engine] = "cannot"
        elif engine not in figures.engines:
            cells[engine] = "failed"
        else:
            share = f"{figures.share_of_floor(engine):.0%}"
            cells[engine] = f"{number(figures.median(engine))} ({share})"
    others = [engine for engine in engines if engine != OURS]
    measured = [engine for engine in others if {engine, OURS} <= figures.engines.keys()]
    for engine in others:
        cells[f"{OURS} / {engine}"] = f"{figures.advantage(engine):.2f} ×" if engine in measured else ""
    if len(others) > 1:
        cells[f"{OURS} / best"] = f"{min(map(figures.advantage, measured)):.2f} ×" if measured else ""
    return cells


def number(value: float) -> str:
    """Render with three digits that count, and all those before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def memory_rows(answers: Mapping[str, Mapping[str, Any]], torch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make a row for each engine's resident memory and what it consists of, in MiB, and one for a process
    that has only imported torch. All but the column "RSS" are PSS."""
    rows = []
    for name, memory in (*answers.items(), ("importing torch alone", torch)):
        processes = sorted(memory["processes"].values(), reverse=True)
        cells = {"what": name, "RSS": _mib(memory["rss"]), "PSS": _mib(memory["pss"])}
        for kind in ("weights", "libraries", "shared memory", "anonymous", "other files"):
            cells[kind] = _mib(memory["kinds"].get(kind, 0))
        rows.append(cells | {"processes": " + ".join(map(_mib, processes))})
    return rows


def _mib(size: int) -> str:
    return f"{size / MIB:.0f}"


def as_json(figures: Figures) -> dict[str, Any]:
    """Render all figures of a case for the file."""
    return {
        "what": figures.case.name,
        "unit": figures.case.unit,
        "floor": figures.floor,
        "engines": {
            engine: {
                "rounds": rounds,
                "median": figures.median(engine),
                "of floor": figures.share_of_floor(engine),
                **({"threads": figures.threads[engine]} if engine in figures.threads else {}),
                **(
                    {"nbengine better by": figures.advantage(engine)}
                    if engine != OURS and OURS in figures.engines
                    else {}
                ),
            }
            for engine, rounds in figures.engines.items()
        },
    }
