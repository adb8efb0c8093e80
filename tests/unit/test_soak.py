"""`make soak-tests` counts what fails, and its busy processes always end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tools import soak
from tests.tools.imports import ROOT

FLAKY = """
from pathlib import Path

def test_each_second_time():
    mark = Path(__file__).with_name("mark")
    if mark.exists():
        mark.unlink()
        raise AssertionError("it was there\\nand more")
    mark.touch()

def test_never():
    pass
"""


def run_soak(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "tests.tools.soak",
        "--workers=0",
        f"--reports={folder / 'reports'}",
        *arguments,
    ]
    # The tests in the folder need none of the plugins.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_what_fails_is_counted_and_shown_with_its_first_error_line(tmp_path: Path) -> None:
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    done = run_soak(tmp_path, "--times=2", "--load=0", str(tmp_path / "test_flaky.py"))
    lines = done.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("2 repeats of 2 tests, in "))
    assert lines[start + 1].startswith("failed 1 of 2: ")
    assert lines[start + 1].endswith("::test_each_second_time")
    assert lines[start + 2].strip() == "AssertionError: it was there"
    assert len(lines) == start + 3
    assert done.returncode == 1


def test_where_nothing_fails_the_status_is_0(tmp_path: Path) -> None:
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    done = run_soak(tmp_path, "--times=1", "--load=0", str(tmp_path / "test_flaky.py"))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing failed")


def test_a_run_that_finds_no_tests_is_a_failure(tmp_path: Path) -> None:
    done = run_soak(tmp_path, "--times=1", "--load=0", str(tmp_path / "test_gone.py"))
    assert done.returncode == 1
    assert "failed 1 of 1: the whole run\n    pytest ended with status 4" in done.stdout


REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_cli" name="a"><failure message="E: 1&#10;2">text</failure></testcase>
<testcase classname="tests.unit.test_cli" name="a"><error message="left behind">text</error></testcase>
<testcase classname="tests.unit.test_cli.TestClass" name="b[x.y]"><error>1st line&#10;2nd</error></testcase>
<testcase classname="tests.unit.test_cli" name="c"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


def test_a_report_names_tests_as_pytest_does(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    file = "tests/unit/test_cli.py"
    errors = {f"{file}::a": "E: 1", f"{file}::TestClass::b[x.y]": "1st line"}
    assert soak.read_report(report) == (3, errors)


def test_the_default_selection_exists() -> None:
    assert [name for name in soak.DEFAULT if not (ROOT / name).exists()] == []


def wait_gone(pids: list[int]) -> None:
    end = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name
)
def test_busy_processes_end_with_the_one_that_started_them(number: signal.Signals) -> None:
    code = (
        "from tests.tools.soak import busy_processes\n"
        "import sys\n"
        "with busy_processes(3) as pids:\n"
        "    print(*pids, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes) as runner:
        assert runner.stdout is not None
        pids = [int(pid) for pid in runner.stdout.readline().split()]
        assert len(pids) == 3
        assert [pid for pid in pids if not psutil.pid_exists(pid)] == []
        runner.send_signal(number)
        wait_gone(pids)


def test_busy_processes_have_a_lower_priority_and_end_with_their_block() -> None:
    with soak.busy_processes(1) as pids:
        end = time.monotonic() + 60
        while os.getpriority(os.PRIO_PROCESS, pids[0]) < min(19, os.nice(0) + soak.NICE):
            assert time.monotonic() < end
            time.sleep(0.01)
    assert not psutil.pid_exists(pids[0])


def test_each_suite_has_its_own_run_and_a_repeat_is_all_of_them() -> None:
    selection = [
        "tests/process/kills",
        "tests/notebook/test_deaths.py::test_x",
        "tests/process/client",
        "/tmp/own.py",
    ]
    assert soak.by_suite(selection) == {
        "process": ["tests/process/kills", "tests/process/client"],
        "notebook": ["tests/notebook/test_deaths.py::test_x"],
        "tests": ["/tmp/own.py"],
    }
    assert set(soak.by_suite(soak.DEFAULT)) == {"process", "notebook"}
    parts = [soak.Repeat(0, 2.0, 3, {}), soak.Repeat(1, 1.0, 2, {"a": "error"})]
    assert soak.joined(parts) == soak.Repeat(1, 3.0, 5, {"a": "error"})
