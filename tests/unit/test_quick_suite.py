"""`make quick` chooses the tests that are nearest to a change."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from tests.conftest import FileScheduling
from tests.tools import durations, quick
from tests.tools.imports import ROOT, distances, module_of


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("nbengine/errors.py", "nbengine.errors"),
        ("nbengine/engine/core/__init__.py", "nbengine.engine.core"),
        ("kernels/cpu/jit.py", "nbengine.kernels.cpu.jit"),
        ("tests/unit/test_cli.py", "tests.unit.test_cli"),
    ],
)
def test_a_file_has_the_name_that_it_is_imported_by(path: str, module: str) -> None:
    assert (ROOT / path).exists()
    assert module_of(path) == module


def test_an_importer_is_one_step_away_and_its_importers_two() -> None:
    found = distances(["nbengine.kv_cache.prefix"])
    assert found["nbengine.kv_cache.prefix"] == 0
    assert found["nbengine.kv_cache.manager"] == 1
    assert found["nbengine.scheduler.state"] == 2
    assert "nbengine.units" not in found


def test_the_nearest_tests_are_chosen_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "seconds_of", lambda name, otherwise: 1.0)
    changed = ["nbengine/kv_cache/prefix.py"]
    everything = quick.choose(changed, budget=10_000)
    assert "tests/unit/kv_cache/test_prefix.py" in everything.chosen
    assert everything.left_out == []
    few = quick.choose(changed, budget=5)
    assert len(few.chosen) == 5
    assert sorted(few.chosen + few.left_out) == sorted(everything.chosen)
    touched = distances(map(module_of, changed))
    farthest = max(touched[module_of(name)] for name in few.chosen)
    assert all(touched[module_of(name)] >= farthest for name in few.left_out)


def test_a_changed_test_runs_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "seconds_of", lambda name, otherwise: 1000.0)
    choice = quick.choose(["tests/unit/test_cli.py", "nbengine/units.py"])
    assert choice.chosen == ["tests/unit/test_cli.py"]
    assert choice.left_out


def test_a_change_that_no_quick_test_can_notice_runs_none() -> None:
    assert quick.choose(["benchmarks/common.py"]) == quick.Choice([], [])


REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_cli" name="a" time="1.5"/>
<testcase classname="tests.unit.test_cli.TestClass" name="b" time="0.5"/>
<testcase classname="tests.unit.gone" name="c" time="9"/>
</testsuite></testsuites>"""


def test_the_table_has_each_suite_and_stands_between_its_marks(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    count, files = durations.read_report(report)
    assert (count, files) == (3, {"tests/unit/test_cli.py": 2.0})
    rows = durations.table({"tests/unit tests/kernels": (61.0, count)}, files)
    assert "| `tests/unit`, `tests/kernels` | 3 | 61 | `tests/unit/test_cli.py` 2 |" in rows
    page = f"before\n{durations.BEGIN}old\n{durations.END}after\n"
    assert durations.with_table(page, rows) == f"before\n{durations.BEGIN}{rows}{durations.END}after\n"


def test_what_is_recorded_are_files_that_there_are() -> None:
    missing = [name for name in durations._record() if not (ROOT / name).is_file()]
    assert not missing, "make durations"


def test_a_process_gets_what_takes_longest_of_all_files_and_folders_and_notebooks_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {
        "tests/a.py": 4.0,
        "tests/process/ray/b.py": 2.0,
        "tests/process/ray/c.py": 2.5,
        "tests/d.py": 1.0,
        "tests/notebook/e.py": 9.0,
    }
    monkeypatch.setattr(durations, "_record", lambda: seconds)
    units = {
        "tests/new.py": ["tests/new.py::test_1", "tests/new.py::test_2", "tests/new.py::test_3"],
        "tests/notebook/e.py": ["tests/notebook/e.py::test_1"],
        "tests/d.py": ["tests/d.py::test_1", "tests/d.py::test_2"],
        "tests/a.py": ["tests/a.py::test_1"],
        "tests/process/ray/": ["tests/process/ray/b.py::test_1", "tests/process/ray/c.py::test_1"],
    }
    numbers = [test for tests in units.values() for test in tests]
    sent: list[str] = []

    class Process:
        def send_runtest_some(self, chosen: list[int]) -> None:
            sent.extend(numbers[number] for number in chosen)

    process = Process()
    scheduling = object.__new__(FileScheduling)
    scheduling.workqueue = OrderedDict((name, dict.fromkeys(tests, False)) for name, tests in units.items())
    scheduling.assigned_work, scheduling.registered_collections = {}, {process: numbers}
    while scheduling.workqueue:
        scheduling._assign_work_unit(process)
    assert sent == [
        test
        for name in ("tests/process/ray/", "tests/a.py", "tests/new.py", "tests/d.py", "tests/notebook/e.py")
        for test in units[name]
    ]


def test_a_test_that_ends_its_process_is_not_run_again_and_the_rest_of_its_file_is() -> None:
    class Process:
        shutting_down = True

    crashed, other = Process(), Process()
    scheduling = object.__new__(FileScheduling)
    scheduling.workqueue = OrderedDict()
    scheduling.assigned_work = {
        crashed: {"a.py": {"a.py::1": True}, "b.py": {"b.py::1": True, "b.py::2": False, "b.py::3": False}},
        other: {"c.py": {"c.py::1": True}},
    }
    assert scheduling.remove_node(crashed) == "b.py::2"
    assert scheduling.workqueue == {"b.py": {"b.py::1": True, "b.py::2": True, "b.py::3": False}}
    assert scheduling.remove_node(other) is None
    scheduling.assigned_work = {crashed: {"d.py": {"d.py::1": False}}}
    assert scheduling.remove_node(crashed) == "d.py::1"
    assert "d.py" not in scheduling.workqueue


def test_a_test_that_goes_to_a_process_on_its_own_counts_as_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "_record", lambda: {"tests/simulation/test_worlds.py": 100.0})
    assert durations.recorded_seconds("tests/simulation/test_worlds.py::test_it[0]") == 100.0
    # A file that nobody has timed does not come last: it may take long.
    assert durations.recorded_seconds("tests/unit/test_new.py") == durations.UNKNOWN_SECONDS


def test_no_process_of_the_tests_imports_what_would_check_formats_that_nobody_has() -> None:
    code = "import sys, jsonschema; sys.exit(bool({'rfc3987_syntax', 'arrow'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)
