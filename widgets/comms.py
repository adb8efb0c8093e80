"""Comms, which carry a widget's messages from the browser to the kernel."""

from __future__ import annotations

from typing import Any


def answer_at_once(comm: Any) -> None:
    """Let a comm's messages arrive where the frontend sends them, not where the comm has last published.

    ipykernel 7.4 would otherwise deliver them only when the cell has ended.
    """
    if getattr(comm, "_reply_subshell_for", None):
        comm._reply_subshell_for = None
