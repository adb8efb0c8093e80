"""Cells as a kernel runs them, in a shell without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
    """Where the shell's outputs were recorded."""
    found = shell.display_pub
    assert isinstance(found, RecordingPublisher)
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait, with the loop running, for at most five seconds."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)
