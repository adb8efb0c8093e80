"""The example notebooks, and how a person runs them in JupyterLab."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from notebook_support.desk import Desk
from notebook_support.lab import POLL_MS, run_command, save, screenshot, wait_until_idle

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.ipynb"))
CELL_SECONDS = 200.0

# A cell that waits or runs has a star; those after an error lose it.
PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map((prompt) => prompt.textContent)"
HAS_BEGUN = f"() => {PROMPTS}.some((text) => /[*\\d]/.test(text))"
HAS_ENDED = f"() => {PROMPTS}.every((text) => !text.includes('*'))"

NOTICE = re.compile(r"^\[engine '.+' (does not say|is busy|makes no progress|goes on).*\]\n?", re.MULTILINE)
"""A cell says this of an engine that lets it wait, as one does on a machine that does other things."""


def plain(cell: nbformat.NotebookNode) -> str:
    """The cell's outputs as a frontend without HTML shows them."""
    shown = (
        NOTICE.sub("", output.get("text") or "") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    )
    return "\n".join(text for text in shown if text)


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The notebook's code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def example(stem: str) -> nbformat.NotebookNode:
    """Read an example, and forget what is stored of a run."""
    notebook = nbformat.read(next(path for path in EXAMPLES if path.stem == stem), as_version=4)
    for cell in code_of(notebook):
        cell.outputs, cell.execution_count = [], None
    return notebook


def run_all_in_lab(desk: Desk, stem: str) -> list[nbformat.NotebookNode]:
    """Run an example by the menu, and save it; returns its code cells, of which none may have failed."""
    path = desk.directory / f"{stem}.ipynb"
    nbformat.write(example(stem), path)
    page = desk.open_file(path.name)
    run_command(page, "notebook:run-all-cells")
    page.wait_for_function(HAS_BEGUN, polling=POLL_MS)
    page.wait_for_function(HAS_ENDED, timeout=1000 * CELL_SECONDS, polling=POLL_MS)
    wait_until_idle(page)
    screenshot(page, f"example_{stem}")
    save(page)
    code = code_of(nbformat.read(path, as_version=4))
    errors = [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert not errors, "\n".join(errors[0].traceback)
    return code
