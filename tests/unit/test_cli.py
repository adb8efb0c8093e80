"""The command `nbengine`, as far as it needs no engine."""

from __future__ import annotations

import pytest

import nbengine
from nbengine.cli import main
from nbengine.frontend import catalogue
from nbengine.widgets.processes.models_report import ModelsReport


def test_version_is_one_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr() == (f"nbengine {nbengine.__version__}\n", "")


def test_models_looks_where_it_is_told_and_lists_the_classes_that_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: list[str] = []

    def report(directories: list[str]) -> ModelsReport:
        looked.extend(directories)
        return ModelsReport([], [], "cpu", 1 << 30, 1e9)

    monkeypatch.setattr(catalogue, "models_report", report)
    monkeypatch.setenv(catalogue.DIRECTORIES_VARIABLE, "/named")
    assert main(["models", "--dir", "/first", "--dir", "/second"]) == 0
    assert looked == ["/named", "/first", "/second"]
    assert "No model lies on this machine yet." in capsys.readouterr().out
    assert main(["models", "--classes"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert len(looked) == 3
