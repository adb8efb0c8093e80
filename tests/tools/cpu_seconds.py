"""A plugin of pytest that tells the CPU seconds of every file: `pytest -p tests.tools.cpu_seconds …`.

They are those of the process that runs the tests and of the processes that it has waited for, and so do not depend on
what else the machine does. Those of a process that nobody has waited for are missing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

PROPERTY = "cpu_seconds"
COLLECTION = "(start and collection)"
MOST_FILES = 40

_by_file: Counter[str] = Counter()
_STARTED = pytest.StashKey[float]()
"""The CPU seconds of this process and its children when an item's present phase began."""


def _seconds() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note when an item begins."""
    item.stash[_STARTED] = _seconds()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Pass on what was spent since the last report."""
    now = _seconds()
    spent, item.stash[_STARTED] = now - item.stash[_STARTED], now
    item.user_properties[:] = [pair for pair in item.user_properties if pair[0] != PROPERTY]
    item.user_properties.append((PROPERTY, spent))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up, in the process that prints."""
    _by_file[report.nodeid.partition("::")[0]] += dict(report.user_properties).get(PROPERTY, 0.0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what it took to get here."""
    _by_file[COLLECTION] = _seconds()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    terminalreporter.section(f"CPU seconds: {sum(_by_file.values()):.0f}")
    for file, seconds in _by_file.most_common(MOST_FILES):
        terminalreporter.write_line(f"{seconds:8.1f}  {file}")
