"""Cells as a kernel runs them, in a shell without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from tests.unit.magics.conftest import RecordingPublisher


async def run(shell: InteractiveShell, code: str) -> ExecutionResult:
    """Run a cell as ipykernel does."""
    cell = shell.transform_cell(code)
    assert shell.should_run_async(code, transformed_cell=cell)
    try:
        return await shell.run_cell_async(code, transformed_cell=cell, store_history=True)
    finally:
        shell.events.trigger("post_execute")


def publisher(shell: InteractiveShell) -> RecordingPublisher:
    """Return the publisher that has recorded the shell's outputs."""
    found = shell.display_pub
    assert isinstance(found, RecordingPublisher)
    return found


def in_cell(shell: InteractiveShell, cell: str, execution: str) -> None:
    """Let the next execution be that of a frontend that names its cells."""
    parent: dict[str, Any] = {"header": {"msg_id": execution}, "metadata": {"cellId": cell}}
    shell.get_parent = lambda: parent  # type: ignore[attr-defined]


async def until(condition: Callable[[], bool]) -> None:
    """Wait, with the loop running, for at most five seconds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
