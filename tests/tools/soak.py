"""`make soak-tests`: chosen tests, again and again beside busy processes, and which of them failed how often.

`python -m tests.tools.soak [--times N] [--load N] [--workers N] [SELECTION …]` takes a selection as pytest does. A test that
depends on how fast the machine is shows itself here. The reports of the last soak stay in `build/soak`.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tools.imports import ROOT

DEFAULT = (
    "tests/process/kills",
    "tests/process/client/test_control.py",
    "tests/process/client/test_death.py",
    "tests/process/client/test_directory.py",
    "tests/process/client/test_stalls.py",
    "tests/process/data_parallel/test_death.py",
    "tests/process/engine/test_end.py",
    "tests/process/engine/test_start.py",
    "tests/process/executor/test_death.py",
    "tests/process/parallel/test_worker_death.py",
    "tests/notebook/test_deaths.py",
    "tests/notebook/lab/test_process_tree.py",
    "tests/notebook/lab/test_recover_page.py",
    "tests/notebook/test_recover.py",
)
"""Tests of what kills, waits and finds things gone: two minutes on two free cores."""
REPORTS = ROOT / "build" / "soak"
NICE = 5
BUSY = f"""
import os, select, sys
os.nice({NICE})
# Its input ends with the process that started it, however that ends.
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(100_000):
        pass
"""
NO_FAILURE = 0
NOTHING_BUT_FAILURES = 1
"""The exit status of pytest when all tests ran and some failed: the report names them."""
GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Repeat:
    """One run of the selection: the number of tests, and the first error line of each that failed."""

    status: int
    seconds: float
    num_tests: int
    errors: dict[str, str]


@dataclass(frozen=True)
class Failure:
    """A test that failed, how often, and the first line of its first error."""

    test: str
    times: int
    error: str


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[list[int]]:
    """Run processes that compute all the time; yield their pids. They end with this process, even if it is killed."""
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield [process.pid for process in processes]


def by_suite(selection: Sequence[str]) -> dict[str, list[str]]:
    """Divide a selection by suites, each of which has its own run: the browser of the notebooks' tests keeps an event
    loop running, beside which no asynchronous test of the others can."""
    parts: dict[str, list[str]] = defaultdict(list)
    for chosen in selection:
        found = Path(chosen).parts
        parts[found[1] if len(found) > 1 and found[0] == "tests" else "tests"].append(chosen)
    return dict(parts)


def joined(parts: Sequence[Repeat]) -> Repeat:
    """Put the runs of the suites together that are one repeat."""
    errors = {name: error for part in parts for name, error in part.errors.items()}
    seconds = sum(part.seconds for part in parts)
    return Repeat(max(part.status for part in parts), seconds, sum(part.num_tests for part in parts), errors)


def run_once(selection: Sequence[str], report: Path, workers: int) -> Repeat:
    """Run the selection with its report in a file."""
    parallel = ["-n", str(workers), "--dist", "loadfile"] if workers else []
    command = [sys.executable, "-m", "pytest", "-q", *parallel, f"--junitxml={report}", *selection]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        status = process.wait()
    except BaseException:
        # Somebody interrupts, and pytest may not know it yet.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        process.kill()
        process.wait()
        raise
    num_tests, errors = read_report(report) if report.is_file() else (0, {})
    if status not in (NO_FAILURE, NOTHING_BUT_FAILURES) or (status and not errors):
        errors |= {"the whole run": f"pytest ended with status {status}"}
    return Repeat(status, time.monotonic() - began, num_tests, errors)


def read_report(report: Path) -> tuple[int, dict[str, str]]:
    """Return the number of tests in a report of pytest (JUnit's XML), and the first error line of each that failed.

    A test that fails and then fails at its end, too, has two entries, and is one test.
    """
    names, errors = set(), {}
    for case in ET.parse(report).iter("testcase"):
        name = _test_name(case)
        names.add(name)
        for kind in ("failure", "error"):
            found = case.find(kind)
            if found is not None:
                lines = (found.get("message") or found.text or "").strip().splitlines()
                errors.setdefault(name, lines[0].strip() if lines else "no reason was given")
    return len(names), errors


def failures(repeats: Sequence[Repeat]) -> list[Failure]:
    """Count how often each test failed, those that did most often first."""
    found: dict[str, list[str]] = defaultdict(list)
    for repeat in repeats:
        for test, error in repeat.errors.items():
            found[test].append(error)
    counted = [Failure(test, len(errors), errors[0]) for test, errors in found.items()]
    return sorted(counted, key=lambda failure: (-failure.times, failure.test))


def summary(repeats: Sequence[Repeat]) -> str:
    """Say how the repeats went, and list what failed."""
    seconds = ", ".join(f"{repeat.seconds:.0f}" for repeat in repeats)
    num_tests = max((repeat.num_tests for repeat in repeats), default=0)
    lines = [f"{len(repeats)} repeat{'s' * (len(repeats) != 1)} of {num_tests} tests, in {seconds} s"]
    found = failures(repeats)
    for failure in found:
        lines += [f"failed {failure.times} of {len(repeats)}: {failure.test}", f"    {failure.error[:300]}"]
    return "\n".join(lines if found else [*lines, "nothing failed"])


def main(arguments: list[str]) -> int:
    """Repeat the tests; return 1 if anything failed, also when the repeats are broken off."""
    options = _parser().parse_args(arguments)
    # Asked to end, it ends pytest, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shutil.rmtree(options.reports, ignore_errors=True)
    options.reports.mkdir(parents=True)
    repeats: list[Repeat] = []
    interrupted = False
    with busy_processes(options.load):
        try:
            for number in range(1, options.times + 1):
                print(f"repeat {number} of {options.times}, beside {options.load} busy processes", flush=True)
                parts = by_suite(options.selection or DEFAULT)
                runs = []
                for suite, part in parts.items():
                    name = f"repeat_{number}_{suite}.xml" if len(parts) > 1 else f"repeat_{number}.xml"
                    runs.append(run_once(part, options.reports / name, options.workers))
                repeats.append(joined(runs))
        except KeyboardInterrupt:
            interrupted = True
    print(summary(repeats))
    if interrupted:
        print("broken off before the last repeat had ended")
    return 1 if interrupted or failures(repeats) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="how often the tests run (%(default)s)")
    parser.add_argument("--load", type=int, default=6, help=f"busy processes at nice {NICE} (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest; 0: none beside it")
    parser.add_argument("--reports", type=Path, default=REPORTS, help=argparse.SUPPRESS)
    parser.add_argument("selection", nargs="*", help="files, folders and tests (the default: what kills)")
    return parser


def _test_name(case: ET.Element) -> str:
    """Return what pytest calls a test, as far as the report tells: its class is the last part of a name."""
    parts = (case.get("classname") or "").split(".")
    for end in range(len(parts), 0, -1):
        file = Path(*parts[:end]).with_suffix(".py")
        if (ROOT / file).is_file():
            return "::".join([str(file), *parts[end:], case.get("name") or ""])
    return "::".join(filter(None, [".".join(parts), case.get("name")]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
