"""A process does not outlive its parent, whatever it has to clear away."""

from __future__ import annotations

import os

import pytest

from nbengine.runtime import lifeline
from nbengine.runtime.lifeline import Lifeline


class Exited(BaseException):
    """Stands for the end of the process."""


def test_a_process_whose_clean_up_fails_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        raise Exited(status)

    def clean_up() -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(lifeline.os, "_exit", end)
    ours, parents = os.pipe()
    watcher = Lifeline(ours, clean_up)
    os.close(parents)
    with pytest.raises(Exited):
        watcher.run()
    os.close(ours)
    for end in (watcher._signals, watcher._signal_writer):
        end.close()
