"""`make durations`: how long the suites and their files take, for CONTRIBUTING.md and for `make quick`.

`python -m tests.tools.durations SUITES=SECONDS REPORT.xml … SUITES=…` takes the clock's seconds and the reports of each run.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.tools.imports import ROOT

RECORD = Path(__file__).with_name("durations.json")
PAGE = ROOT / "CONTRIBUTING.md"
UNKNOWN_SECONDS = 3.0
"""A file without a recorded time is taken to need this long."""
BEGIN, END = "<!-- durations: begin -->\n", "<!-- durations: end -->\n"


@cache
def _record() -> dict[str, float]:
    files: dict[str, float] = json.loads(RECORD.read_text())["files"]
    return files


def seconds_of(file: str, otherwise: float) -> float:
    """The recorded seconds of all tests of a file, given relative to the root."""
    return _record().get(file, otherwise)


def recorded_seconds(scope: str) -> float:
    """The recorded seconds of what goes to one process: the tests of a file, or those of a folder (`…/`)."""
    if scope.endswith("/"):
        return sum(seconds for file, seconds in _record().items() if file.startswith(scope))
    return seconds_of(scope.partition("::")[0], UNKNOWN_SECONDS)


def read_report(report: Path) -> tuple[int, dict[str, float]]:
    """The number of tests in a report of pytest (JUnit's XML), and the seconds of each file."""
    count, files = 0, defaultdict(float)
    for case in ET.parse(report).iter("testcase"):
        count += 1
        # A class of tests is the last part of the name, and no file.
        parts = (case.get("classname") or "").split(".")
        while parts and not (ROOT / Path(*parts).with_suffix(".py")).is_file():
            parts.pop()
        if parts:
            files[str(Path(*parts).with_suffix(".py"))] += float(case.get("time") or 0)
    return count, dict(files)


def table(suites: dict[str, tuple[float, int]], files: dict[str, float]) -> str:
    """The table of CONTRIBUTING.md: each suite with its seconds and its slowest files."""
    lines = ["| suites | tests | seconds | slowest files |", "|---|---|---|---|"]
    for name, (seconds, count) in suites.items():
        own = [(time, file) for file, time in files.items() if file.startswith(tuple(name.split()))]
        slowest = ", ".join(f"`{file}` {time:.0f}" for time, file in sorted(own, reverse=True)[:3])
        lines.append(
            f"| {', '.join(f'`{part}`' for part in name.split())} | {count} | {seconds:.0f} | {slowest} |"
        )
    lines.append(
        f"| together | {sum(c for _, c in suites.values())} | {sum(s for s, _ in suites.values()):.0f} | |"
    )
    return "\n".join(lines) + "\n"


def with_table(page: str, rows: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with the table in the place that is marked for it."""
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    return head + begin + rows + end + tail


def main(arguments: list[str]) -> None:
    """Write the record and the table."""
    suites: dict[str, tuple[float, int]] = {}
    files: dict[str, float] = {}
    for argument in arguments:
        name, is_run, seconds = argument.partition("=")
        if is_run:
            suites[name] = (float(seconds), 0)
            continue
        count, own = read_report(Path(argument))
        name, (of_clock, before) = list(suites.items())[-1]
        suites[name] = (of_clock, before + count)
        files |= own
    rounded = {file: round(seconds, 1) for file, seconds in sorted(files.items())}
    record = {"suites": {name: round(seconds) for name, (seconds, _) in suites.items()}, "files": rounded}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), table(suites, files)))


if __name__ == "__main__":
    main(sys.argv[1:])
