"""Every line of the README that can be typed does what it says, in one notebook, from the first to the last."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nbformat import write
from nbformat.v4 import new_code_cell, new_notebook
from notebook_support.kernel import Kernel
from notebook_support.warm_kernels import cold

import nbengine
from nbengine.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"^```(?:python)?\n(?P<block>.*?)^```$|`(?P<inline>[^`\n]+)`", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"%(engine|dashboard)\b(?!.*(\[|\b[A-Z]{2,}\b))|%%generate -h$|answers\.rows\(\)$")
"""A pattern of code within a sentence that can be typed as it is: no word in it stands for another one."""
START_SECONDS = 180.0


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
        "%%generate -h",
        "%engine scale --dp 4",
        "answers.rows()",
    ):
        assert line in found, line
    assert not any("MODEL" in cell for cell in found)


@pytest.mark.timeout(600)
def test_every_cell_of_the_readme_runs(start_kernel: Callable[[], Kernel]) -> None:
    kernel, compared = start_kernel(), False
    # How long an answer gets where the page does not say it is nothing that the page tells.
    kernel.run("%config NBEngine.max_tokens = 40")
    for source in cells(README):
        cell = kernel.run(source, START_SECONDS)
        if "-o answers" in source:
            assert kernel.value("len(answers)") == 6
            compared = True
    assert cell.status == "ok"
    assert compared, "no cell asked for answers"
    # An engine that is left would be in the way of the first cell, after a restart of the kernel.
    assert "no engine runs on this machine" in kernel.run("%engine ps").text
    kernel.run("%engine start random-tiny-moe", START_SECONDS)
    for command in shell_commands():
        if command in SAID:
            check_command(command)
    assert "no engine runs on this machine" in kernel.run("%engine ps").text


ARGUMENTS = {
    "fetch": ["smollm2-135m"],
    "fit": ["random-tiny"],
    "logs": ["random-tiny-moe"],
    "stop": ["random-tiny-moe"],
}
SAID = {
    "models": "smollm2-135m",
    "fetch": "smollm2-135m: /",
    "fit": "random-tiny",
    "ps": "random-tiny-moe",
    "logs": "start: takes requests after",
    "stop": "random-tiny-moe",
    "reap": "",
    "--version": nbengine.__version__,
}
"""The words of each command beside an engine that runs."""
STAYING = {"start", "attach", "chat", "serve"}
"""The commands that go on, or whose engine does: `tests/process/test_shell.py` and the server's tests run them."""


def shell_commands() -> list[str]:
    """The commands that the README names, in its order."""
    _, _, rest = README.partition("On the command line:")
    sentence = rest.partition("\n\n")[0]
    return [words.split()[0] for words in re.findall(r"`(?:nbengine )?([^`]+)`", sentence)]


def check_command(command: str) -> None:
    typed = [str(Path(sys.executable).with_name("nbengine")), command, *ARGUMENTS.get(command, [])]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert SAID[command] in done.stdout


def test_the_commands_of_the_shell_are_there() -> None:
    assert set(shell_commands()) == SAID.keys() | STAYING
    for command in shell_commands():
        try:
            status = main([command, "-h"])
        except SystemExit as end:
            status = int(end.code or 0)
        assert status == 0


def test_what_is_installed_has_the_parts_that_the_readme_names() -> None:
    (install,) = re.findall(r'^pip install "\.\[([\w,]+)\]"', README, re.MULTILINE)
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(install.split(",")) <= set(offered)
    assert "-c constraints.txt" in README
    assert (ROOT / "constraints.txt").is_file()


def test_the_two_commands_for_a_fresh_machine_are_there() -> None:
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_demo_runs_a_notebook_prints_its_cells_and_keeps_it(
    notebook_environment: dict[str, str], tmp_path: Path
) -> None:
    # The tests themselves may be run by make, which would say where it goes.
    command = ["make", "--no-print-directory", "-n", "demo"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    script, notebook = printed.stdout.split()[-2:]
    # `test_examples.py` runs this one.
    assert notebook == "examples/01_quickstart.ipynb"
    cells = [new_code_cell("%load_ext nbengine"), new_code_cell("%engine ps")]
    small, executed = tmp_path / "small.ipynb", tmp_path / "executed" / "small.ipynb"
    write(new_notebook(cells=cells), small)
    done = subprocess.run(
        [sys.executable, script, str(small)],
        cwd=ROOT,
        env=cold(notebook_environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "> %engine ps\nno engine runs on this machine" in done.stdout
    assert "no engine runs on this machine" in executed.read_text()
