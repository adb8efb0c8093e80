"""The example notebooks run, from top to bottom, and are committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def plain(cell: nbformat.NotebookNode) -> str:
    """The cell's outputs as a frontend without HTML shows them."""
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_and_has_no_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_the_quickstart_runs_and_what_it_shows_is_true(
    notebook_environment: dict[str, str], clean_afterwards: None
) -> None:
    path = next(path for path in EXAMPLES if path.stem == "01_quickstart")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=100, kernel_name="python3", coalesce_streams=True)
    await client.async_execute(env=notebook_environment)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = {cell.source: plain(cell) for cell in code}
    assert all(shown[name] for name in ("%engine start", "%engine status", "%engine stop"))
    generated = [cell for cell in code if cell.source.startswith("%%generate")]
    assert len(generated) == 4
    for cell in generated:
        (output,) = cell.outputs
        assert set(output.data) == {"text/plain", "text/html"}
        assert "tokens ·" in output.data["text/plain"]
    assert "prime" in plain(generated[0])
    assert "Marseille" in plain(generated[1])
    assert "prompt tokens reused" in plain(generated[3])
    assert "processes are gone" in shown["%engine stop"]
