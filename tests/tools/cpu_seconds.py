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
_IS_LAST = pytest.StashKey[bool]()
"""True of the last item of a file."""
_begun: dict[str, float] = {}
"""The file whose tests run, with the CPU seconds of this process and its children when its first one began."""


def _seconds() -> float:
    return sum(os.times()[:4])


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Note when the first item of a file begins, and which is the last."""
    file = _file_of(item.nodeid)
    if file not in _begun:
        _begun.clear()
        _begun[file] = _seconds()
    item.stash[_IS_LAST] = nextitem is None or _file_of(nextitem.nodeid) != file
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Pass on what the file has spent. To ask at each test took 1.5 of 14 seconds of 3,000 empty ones."""
    if call.when == "teardown" and item.stash[_IS_LAST]:
        item.user_properties.append((PROPERTY, _seconds() - _begun.pop(_file_of(item.nodeid))))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up, in the process that prints."""
    _by_file[_file_of(report.nodeid)] += dict(report.user_properties).get(PROPERTY, 0.0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what it took to get here."""
    _by_file[COLLECTION] = _seconds()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    terminalreporter.section(f"CPU seconds: {sum(_by_file.values()):.0f}")
    for file, seconds in _by_file.most_common(MOST_FILES):
        terminalreporter.write_line(f"{seconds:8.1f}  {file}")
