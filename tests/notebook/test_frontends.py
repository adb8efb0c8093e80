"""Other versions of the kernel, and programs that run notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from notebook_support.kernel import Kernel
from notebook_support.lab import write_notebook
from notebook_support.leaks import wait_until_clean
from notebook_support.paced import start_line

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KERNELS = Path(sys.prefix) / "ipykernels"
"""Where `make` puts the versions that are not the environment's own."""
CELLS = [
    "%load_ext nbengine",
    start_line(tokens_per_second=500),
    "%%generate -o answer --max-tokens 26\nhi",
    "print(answer.text, answer.finish_reason)",
    "%engine stop",
]


def test_papermill_runs_a_notebook(
    notebook_environment: dict[str, str], clean_afterwards: None, tmp_path: Path
) -> None:
    write_notebook(tmp_path / "in.ipynb", CELLS)
    run(notebook_environment, "papermill", "in.ipynb", "out.ipynb", "--no-progress-bar", directory=tmp_path)
    assert_ran(tmp_path / "out.ipynb")


def test_jupyter_execute_runs_a_notebook(
    notebook_environment: dict[str, str], clean_afterwards: None, tmp_path: Path
) -> None:
    write_notebook(tmp_path / "in.ipynb", CELLS)
    run(notebook_environment, "jupyter-execute", "--output=out", "in.ipynb", directory=tmp_path)
    assert_ran(tmp_path / "out.ipynb")


@pytest.fixture(scope="module", params=["6.31.0", "7.3.0"])
def other_kernel(request: pytest.FixtureRequest, notebook_environment: dict[str, str]) -> Iterator[Kernel]:
    """A kernel of another ipykernel than the environment's, with an engine that writes 200 tokens a second."""
    directory = KERNELS / request.param
    if not directory.is_dir():
        pytest.skip(f"ipykernel {request.param} is not in {KERNELS} (make installs it there)")
    path = os.pathsep.join([str(directory), notebook_environment["PYTHONPATH"]])
    kernel = Kernel(notebook_environment | {"PYTHONPATH": path})
    kernel.run("import ipykernel")
    assert kernel.value("ipykernel.__version__") == request.param
    kernel.run(start_line(tokens_per_second=200))
    yield kernel
    kernel.run("%engine stop")
    kernel.close()
    wait_until_clean(Path(notebook_environment["XDG_RUNTIME_DIR"]))


def test_another_ipykernel_streams_and_keeps_what_an_interrupt_leaves(other_kernel: Kernel) -> None:
    cell = other_kernel.run("%%generate -o answer --max-tokens 52\nhi\n")
    assert len(cell.outputs) == 1
    assert len(cell.updates) > 3
    assert cell.text.startswith(ALPHABET * 2)
    cell = other_kernel.start("%%generate -o answer --max-tokens 3000\nhi\n")
    other_kernel.wait_for_text(cell, ALPHABET)
    other_kernel.interrupt()
    other_kernel.finish(cell)
    assert [output["kind"] for output in cell.outputs] == ["display_data", "error"]
    assert cell.outputs[1]["ename"] == "KeyboardInterrupt"
    text, reason = other_kernel.value("(answer.text, answer.finish_reason)")
    assert reason == "abort"
    assert text == (ALPHABET * 200)[: len(text)]


def test_in_another_ipykernel_a_background_answer_stays_in_its_cell(other_kernel: Kernel) -> None:
    cell = other_kernel.run("%generate -a -o later --max-tokens 60 hi")
    elsewhere = other_kernel.run("result = await later")
    assert not elsewhere.outputs
    other_kernel.pump(lambda: "60 tokens" in cell.text, "the answer's foot line")
    assert cell.text.startswith(ALPHABET * 2)


def run(environment: dict[str, str], program: str, *arguments: str, directory: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def assert_ran(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    answer, printed = cells[-3].outputs, cells[-2].outputs
    assert len(answer) == 1
    assert answer[0].data["text/plain"].startswith(ALPHABET)
    assert "26 tokens" in answer[0].data["text/plain"]
    assert printed[0].text == f"{ALPHABET} length\n"
