"""Cells that talk, and what reached the engine."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from tests.unit.magics.conftest import FakeClient


def run(shell: InteractiveShell, code: str, cell: str | None = None, execution: str = "1") -> None:
    """Run a cell, as frontends do that say which cell it is."""
    shell.get_parent = lambda: (  # type: ignore[attr-defined]
        {} if cell is None else {"metadata": {"cellId": cell}, "header": {"msg_id": execution}}
    )
    shell.run_cell(code).raise_error()


def prompts(engine: FakeClient) -> list[str]:
    return [prompt["prompt"] for prompt, _ in engine.requests]
