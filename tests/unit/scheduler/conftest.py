"""Reports how many events the random histories went through."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.unit.scheduler.paged_model", "tests.unit.scheduler.simulation")

from tests.unit.scheduler.simulation import TOTALS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOTALS:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(TOTALS.items()))
        terminalreporter.write_line(f"scheduler histories: {counts}")
