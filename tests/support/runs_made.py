"""Runs that nobody has asked."""

from __future__ import annotations

import time
from typing import Any

from nbengine.frontend.runs.run import Run


def made_run(**given: Any) -> Run:
    """Make a run, with what is given."""
    usual: dict[str, Any] = {
        "time": time.time(),
        "kind": "generate",
        "engine": "box",
        "model": "tiny",
        "model_version": "r1",
        "nbengine": "0.1.0",
        "prompt": "why?",
        "text": "because",
        "finish_reason": "stop",
    }
    return Run(**{**usual, **given})
