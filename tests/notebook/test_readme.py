"""Every line of the README that can be typed does what it says, in one notebook, from the first to the last."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from notebook_support.kernel import Kernel

from nbengine.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"^```(?:python)?\n(?P<block>.*?)^```$|`(?P<inline>[^`\n]+)`", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"%(engine|dashboard)\b(?!.*(\[|\b[A-Z]{2,}\b))|answers\.rows\(\)$")
"""A pattern of code within a sentence that can be typed as it is: no word in it stands for another one."""
START_SECONDS = 90.0


def cells(text: str) -> Iterator[str]:
    """Yield the cells that a reader would run in a notebook, in order, from behind the introduction."""
    for found in CODE.finditer(text, text.index("\n## ")):
        block, inline = found["block"], found["inline"]
        if block is not None and not block.startswith("make "):
            yield block
        elif inline is not None and TYPED.match(inline):
            yield inline


def test_the_cells_are_found() -> None:
    found = list(cells(README))
    assert found[0] == "%load_ext nbengine\n%engine start\n"
    for line in (
        "%engine sleep",
        "%engine recover",
        "%engine help",
        "%engine scale --dp 4",
        "answers.rows()",
    ):
        assert line in found, line
    assert not any("MODEL" in cell for cell in found)


@pytest.mark.timeout(400)
def test_every_cell_of_the_readme_runs(start_kernel: Callable[[], Kernel]) -> None:
    kernel, compared = start_kernel(), False
    for source in cells(README):
        cell = kernel.run(source, START_SECONDS)
        if "-o answers" in source:
            assert kernel.value("len(answers)") == 6
            compared = True
    assert cell.status == "ok"
    assert compared, "no cell asked for answers"
    kernel.run("%engine stop")


def test_the_commands_of_the_shell_are_there() -> None:
    line = next(line for line in README.splitlines() if line.startswith("On the command line:"))
    commands = [words.split()[0] for words in re.findall(r"`(?:nbengine )?([^`]+)`", line)]
    assert set(commands) == {"fetch", "fit", "ps", "stop", "reap", "logs", "--version"}
    for command in commands:
        try:
            status = main([command, "-h"])
        except SystemExit as end:
            status = int(end.code or 0)
        assert status == 0


def test_the_two_commands_for_a_fresh_machine_are_there() -> None:
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
