"""`make models`: which models were compared with transformers, and how, for docs/models.md.

The tests that compare a model say so with the fixture `compared`; this runs them, counts those that have passed, and
writes the table.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from nbengine.models.listing import runnable
from tests.tools.durations import with_table
from tests.tools.imports import ROOT

PROPERTY = "compared"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- compared: begin -->\n", "<!-- compared: end -->\n"
FOLDER = ROOT / "tests" / "unit" / "models"
COLUMNS = {
    "cut": "batches, chunks",
    "engine": "engine",
    "tensor": "TP",
    "pipeline": "PP",
    "gguf": "GGUF",
}
"""The circumstances of a comparison, and the heads of their columns."""
THROUGH_TRANSFORMERS = "layers of transformers: decoders"
ENCODERS_THROUGH_TRANSFORMERS = "layers of transformers: encoders"


class Counting:
    """A plugin of pytest that runs the tests that compare, and counts what those that passed have compared."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests that do not say what they compare."""
        items[:] = [item for item in items if PROPERTY in getattr(item, "fixturenames", ())]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count in the process that prints."""
        if report.when == "call" and report.passed:
            for key, value in report.user_properties:
                if key == PROPERTY:
                    name, _, circumstance = str(value).partition("/")
                    self.counts[name, circumstance] += 1


def rows() -> dict[str, tuple[str, ...]]:
    """The rows of the table, each with the classes, or the other names, that tests call its models by."""
    known = {row.title: row.architectures for row in runnable({})}
    others = (THROUGH_TRANSFORMERS, ENCODERS_THROUGH_TRANSFORMERS)
    return known | {name: (name,) for name in others}


def table(counts: Counter[tuple[str, str]]) -> str:
    """The table: how many comparisons of each kind have passed."""
    lines = [f"| models | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for title, names in rows().items():
        cells = [sum(counts[name, column] for name in names) for column in COLUMNS]
        lines.append(f"| {title} | {' | '.join(str(cell or '-') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def table_on_page() -> dict[str, dict[str, int]]:
    """The comparisons of each row of the page, by circumstance; 0 where there are none."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    found = {}
    for line in rest.partition(END)[0].splitlines()[2:]:
        title, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        numbers = [0 if cell == "-" else int(cell) for cell in cells]
        found[title] = dict(zip(COLUMNS, numbers, strict=True))
    return found


def main() -> int:
    """Run the tests, and write the table if all have passed."""
    counting = Counting()
    code = pytest.main(["-q", str(FOLDER)], plugins=[counting])
    if code == pytest.ExitCode.OK:
        PAGE.write_text(with_table(PAGE.read_text(), table(counting.counts), BEGIN, END))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
