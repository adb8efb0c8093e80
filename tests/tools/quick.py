"""`make quick`: the linters, and the quick tests that a change touches, in less than a minute.

The change is what differs from `BASE` (by default the last commit, or the one before it where nothing is uncommitted). The
tests nearest to it go first: changed ones, those that import a changed module, those that import one of its importers, and so
on, as far as the time goes. What is left out is named: `make test` runs everything.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from tests.tools.durations import UNKNOWN_SECONDS, seconds_of
from tests.tools.imports import ROOT, distances, module_of

SUITES = ("tests/unit/", "tests/kernels/")
WORKERS = 2
SECONDS = 35.0
"""For the tests, beside some twenty for the linters and the start of two processes."""


@dataclass(frozen=True)
class Choice:
    """Test files, the nearest to the change first."""

    chosen: list[str]
    left_out: list[str]


def changed_files(base: str) -> list[str]:
    """The Python files that differ from a commit, and those that git does not know yet."""
    names = _git("diff", "--name-only", "--diff-filter=d", base) + _git(
        "ls-files", "--others", "--exclude-standard"
    )
    return sorted({name for name in names if name.endswith(".py")})


def choose(changed: list[str], budget: float = SECONDS * WORKERS) -> Choice:
    """Choose test files until their recorded seconds reach the budget; changed ones are always among them."""
    touched = distances(module_of(name) for name in changed)
    files = sorted(path for top in SUITES for path in (ROOT / top).rglob("test_*.py"))
    ranked = []
    for path in files:
        name = str(path.relative_to(ROOT))
        distance = touched.get(module_of(name))
        if distance is not None:
            ranked.append((distance, seconds_of(name, UNKNOWN_SECONDS), name))
    chosen, left_out, spent = [], [], 0.0
    for distance, seconds, name in sorted(ranked):
        if distance == 0 or spent + seconds <= budget:
            chosen.append(name)
            spent += seconds
        else:
            left_out.append(name)
    return Choice(chosen, left_out)


def main(arguments: list[str]) -> int:
    """Run everything and return the exit status of the first command that fails."""
    base = arguments[0] if arguments else _default_base()
    changed = [name for name in changed_files(base) if (ROOT / name).is_file()]
    choice = choose(changed)
    python = sys.executable
    commands = [
        [python, "-m", "ruff", "check", "--quiet", "."],
        [python, "-m", "ruff", "format", "--quiet", "--check", "."],
        [python, "-m", "mypy"],
    ]
    if choice.chosen:
        tests = [python, "-m", "pytest", "-q", "-n", str(WORKERS), "--dist", "loadfile", *choice.chosen]
        commands.append(tests)
    print(f"{len(changed)} changed files since {base}: {len(choice.chosen)} test files", flush=True)
    for command in commands:
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status:
            return status
    if choice.left_out:
        print(f"left out for lack of time ({len(choice.left_out)}): {' '.join(choice.left_out[:10])} …")
    return 0


def _default_base() -> str:
    return "HEAD" if changed_files("HEAD") else "HEAD~1"


def _git(*arguments: str) -> list[str]:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
