"""This module runs cells in a real kernel, for the benchmarks."""

from __future__ import annotations

import queue
from typing import Any


def execute(client: Any, code: str, on_output: Any = None) -> None:
    """Run a cell to its end; raise if it failed, though not if it was interrupted."""
    request = client.execute(code)
    while True:
        try:
            message = client.get_iopub_msg(timeout=120)
        except queue.Empty:
            raise TimeoutError(f"no message for 120 s from:\n{code}") from None
        if message["parent_header"].get("msg_id") != request:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "error" and content["ename"] != "KeyboardInterrupt":
            raise RuntimeError("\n".join(content["traceback"]))
        if on_output is not None:
            on_output(kind, content)
        if kind == "status" and content["execution_state"] == "idle":
            return
