"""`%engine models`: which directories are looked at, and the classes that run."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.frontend import catalogue
from nbengine.models.suggested import SUGGESTED
from nbengine.widgets.processes.models_report import ModelsReport


def test_the_caches_and_all_directories_that_are_named_are_looked_at(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: list[str] = []

    def report(directories: list[str]) -> ModelsReport:
        looked.extend(directories)
        return ModelsReport([], [], "cpu", 1 << 30, 1e9)

    monkeypatch.setattr(catalogue, "models_report", report)
    monkeypatch.setenv(catalogue.DIRECTORIES_VARIABLE, "/third")
    shell.run_cell("%config NBEngine.model_dirs = ['/first', '/second']").raise_error()
    shell.run_cell("%engine models").raise_error()
    assert looked == ["/first", "/second", "/third"]
    assert "No model lies on this machine yet." in capsys.readouterr().out


def test_the_classes_that_run_are_behind_a_flag(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%engine models --classes").raise_error()
    said = capsys.readouterr().out
    assert "LlamaForCausalLM" in said
    assert not any(each.name in said for each in SUGGESTED)
    with pytest.raises(UsageError, match="--clases"):
        shell.run_line_magic("engine", "models --clases")
