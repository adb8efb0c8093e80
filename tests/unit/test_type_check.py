"""Types are checked in one process where mypy's others do not come up."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.tools import type_check


@pytest.mark.parametrize(
    ("workers", "first", "statuses", "result"),
    [
        (2, "Success", [0], 0),
        (2, "a.py:1: error: no", [1], 1),
        (2, f"{type_check.NOT_STARTED}: …\nINTERNAL ERROR", [2, 0], 0),
        (2, f"{type_check.NOT_STARTED}: …", [2, 1], 1),
        (1, "", [1], 1),
    ],
)
def test_only_processes_that_did_not_come_up_are_done_without(
    monkeypatch: pytest.MonkeyPatch, workers: int, first: str, statuses: list[int], result: int
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, statuses[len(commands) - 1], first, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert type_check.check(workers, ["x.py"]) == result
    assert len(commands) == len(statuses)
    assert all("x.py" in command for command in commands)
    assert "--num-workers" not in commands[-1] or len(statuses) == 1


def test_the_words_are_those_of_mypy() -> None:
    found = importlib.util.find_spec("mypy")
    assert found is not None
    assert found.submodule_search_locations is not None
    assert type_check.NOT_STARTED in (Path(found.submodule_search_locations[0]) / "build.py").read_text()
