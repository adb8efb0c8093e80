"""Execute a notebook in a real kernel, show how far it is, and print what its cells streamed.

python examples/run.py examples/01_quickstart.ipynb [--store]
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

WIDGET = "application/vnd.jupyter.widget-view+json"
LOG_DIRECTORY = re.compile(r"/[^\s\"<>\\]*/nbengine-logs/")
"""The place of an engine's log, as it stands in outputs."""


class ProgressClient(NotebookClient):
    """A `NotebookClient` that keeps one status line on the terminal."""

    started: float = 0.0

    def show(self, text: str) -> None:
        """Replace the status line (on a terminal) or print a new one."""
        line = f"[{time.monotonic() - self.started:5.1f} s] {text}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K{line[:110]}")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    async def cell_started(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        """Show that a cell is about to run; nbclient calls this."""
        if cell.cell_type == "code":
            first = cell.source.strip().splitlines()[0] if cell.source.strip() else "(empty)"
            self.show(f"cell {cell_index + 1} of {len(self.nb.cells)}: {first}")


def execute(path: Path, output: Path, timeout: float) -> nbformat.NotebookNode:
    """Run every cell of the notebook at `path` and write the executed notebook to `output`, also on
    failure."""
    notebook = nbformat.read(path, as_version=4)
    client = ProgressClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.on_cell_start = client.cell_started
    client.started = time.monotonic()
    try:
        client.execute()
    finally:
        output.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, output)
        client.show(f"done: {path.name}")
        sys.stderr.write("\n")
    return notebook


def cell_text(cell: nbformat.NotebookNode) -> str:
    """Return the plain text of everything that a cell shows."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stdout":
            parts.append(output.text)
        elif output.output_type in ("display_data", "execute_result"):
            parts.append(output.data.get("text/plain", ""))
    return "\n".join(part.rstrip() for part in parts if part.strip())


def print_cells(notebook: nbformat.NotebookNode) -> None:
    """Print each code cell and what it showed."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            print("\n".join(f"> {line}" for line in cell.source.splitlines()))
            print(cell_text(cell), end="\n\n")


def store(executed: nbformat.NotebookNode, path: Path) -> None:
    """Keep what the cells have shown in the notebook at `path`, without what only means something where it ran."""
    notebook = nbformat.read(path, as_version=4)
    for cell, new in zip(notebook.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            for output in new.outputs:
                output.get("data", {}).pop(WIDGET, None)
            cell.outputs, cell.execution_count = new.outputs, new.execution_count
    text = LOG_DIRECTORY.sub("/run/user/1000/jupyter/nbengine-logs/", nbformat.writes(notebook))
    path.write_text(text + "\n", "utf-8")


def main() -> int:
    """Run one notebook; return 1 when a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, help="default: an `executed` folder beside the notebook")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one cell may take")
    parser.add_argument("--store", action="store_true", help="keep the outputs in the notebook itself, too")
    args = parser.parse_args()
    output = args.output or args.notebook.parent / "executed" / args.notebook.name
    try:
        notebook = execute(args.notebook, output, args.timeout)
    except (CellExecutionError, DeadKernelError) as error:
        print(error, file=sys.stderr)
        print(f"the part of the notebook that ran: {output}", file=sys.stderr)
        return 1
    if args.store:
        store(notebook, args.notebook)
    print_cells(notebook)
    print(f"executed notebook: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
