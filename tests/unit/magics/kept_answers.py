"""Answers that an engine has kept, and the lines that tell of them."""

from __future__ import annotations

import time

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.frontend.outputs.transcripts import Transcript
from nbengine.outputs import CompletionOutput, RequestOutput

Capture = pytest.CaptureFixture[str]


def kept(
    request_id: str,
    text: str,
    *,
    age: float = 60.0,
    reason: str | None = "abort",
    cause: str = "the client left",
    was_read: bool = False,
    prompt: str = "why?",
    missing: int = 0,
) -> Transcript:
    """Make a kept answer with one token a character."""
    submitted = time.time() - age
    completion = CompletionOutput(0, text, [ord(c) for c in text], None, None, reason)
    output = RequestOutput(request_id, prompt, None, [completion], reason is not None)
    ended = None if reason is None else submitted + 1
    return Transcript(request_id, "s", prompt, output, 3, submitted, ended, cause, was_read, missing)


def said(shell: InteractiveShell, line: str, capsys: Capture) -> str:
    """Run a line, check that it succeeds, and return what it prints."""
    capsys.readouterr()
    shell.run_cell(line).raise_error()
    return capsys.readouterr().out
