"""How a widget's messages from the browser reach the kernel."""

from __future__ import annotations

from typing import Any


def answer_at_once(comm: Any) -> None:
    """Have a comm's messages taken in where the frontend sends them, not where the comm has last published: ipykernel 7.4
    would leave them until the cell has ended."""
    if getattr(comm, "_reply_subshell_for", None):
        comm._reply_subshell_for = None
