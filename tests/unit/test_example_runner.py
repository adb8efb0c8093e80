"""`examples/run.py` can keep what cells have shown in the notebook itself."""

from __future__ import annotations

import runpy
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).parents[2]


def test_what_cells_have_shown_is_kept_without_what_only_means_something_where_it_ran(tmp_path: Path) -> None:
    path = tmp_path / "example.ipynb"
    old = new_output("stream", text="before")
    cells = [
        new_markdown_cell("words"),
        new_code_cell("look()", id="kept", outputs=[old], metadata={"tags": ["a"]}),
    ]
    nbformat.write(new_notebook(cells=cells), path)
    executed = nbformat.read(path, as_version=4)
    widget = "application/vnd.jupyter.widget-view+json"
    data = {
        "text/plain": 'log  /tmp/some where/else-1/nbengine-logs/e-1.log\nthe "rest"',
        "text/html": "<td>/tmp/else-1/jupyter/nbengine-logs/e-1.log</td>",
        widget: {"model_id": "gone"},
    }
    executed.cells[1].outputs = [new_output("display_data", data=data)]
    executed.cells[1].execution_count = 3
    executed.cells[1].metadata["execution"] = {"started": "now"}
    runpy.run_path(str(ROOT / "examples" / "run.py"))["store"](executed, path)
    words, cell = nbformat.read(path, as_version=4).cells
    assert words.source == "words"
    assert (cell.id, cell.metadata, cell.execution_count) == ("kept", {"tags": ["a"]}, 3)
    (output,) = cell.outputs
    assert set(output.data) == {"text/plain", "text/html"}
    place = "/run/user/1000/jupyter/nbengine-logs/e-1.log"
    assert output.data["text/html"] == f"<td>{place}</td>"
    assert output.data["text/plain"].endswith(f'where{place}\nthe "rest"')
