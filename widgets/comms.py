"""Comms, which carry a widget's messages from the browser to the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython

from nbengine.widgets.live import in_kernel


def answer_at_once(comm: Any) -> None:
    """Let a comm's messages arrive where the frontend sends them, not where the comm has last published.

    ipykernel 7.4 would otherwise deliver them only when the cell has ended.
    """
    if getattr(comm, "_reply_subshell_for", None):
        comm._reply_subshell_for = None


def interrupt_path() -> str:
    """Return the path where a server interrupts this kernel, `api/kernels/<id>`; empty without a server."""
    if not in_kernel(get_ipython()):
        return ""
    from ipykernel.connect import get_connection_file

    try:
        name = Path(get_connection_file()).stem
    except RuntimeError:
        # A kernel inside another program has no connection file.
        return ""
    return f"api/kernels/{name.removeprefix('kernel-')}" if name.startswith("kernel-") else ""
