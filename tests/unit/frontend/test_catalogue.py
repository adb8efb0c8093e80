"""The table of models: what each needs, whether it fits, and how fast one request of it may be."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from nbengine.config import ModelConfig
from nbengine.engine import fit_probe
from nbengine.frontend import catalogue
from nbengine.frontend import fit as fit_module
from nbengine.ipc.fit import FitAnswers, FitQuestion, FitQuestions
from nbengine.models.checkpoints.files import resolve_model
from nbengine.widgets.processes.models_report import ModelsReport


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelsReport:
    """A report of one model, which is there twice, on a machine that reads a megabyte a second."""
    monkeypatch.setenv("NBENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    resolve_model(ModelConfig(model="random-tiny"))
    monkeypatch.setattr(fit_probe, "read_speed", lambda device: 1e6)

    def ask(questions: list[FitQuestion], *, measures: bool = False) -> FitAnswers:
        return fit_probe.answers(FitQuestions(questions, measures))

    monkeypatch.setattr(fit_module, "_ask", ask)
    return catalogue.models_report([str(tmp_path / "<b>none</b>")])


def test_a_model_has_its_needs_and_a_speed_that_memory_allows(report: ModelsReport) -> None:
    model, missing = report.kept
    assert model.fit is not None
    assert model.fit.fits
    assert model.tokens_per_second == pytest.approx(1e6 / model.fit.weights_bytes)
    assert missing.fit is None
    text, html = report.tables()
    row = next(line for line in text.splitlines() if line.startswith("random-tiny "))
    assert "LlamaForCausalLM" in row
    assert "fits, 2,048 tokens" in row
    assert f"about {1e6 / model.fit.weights_bytes:.2g} tokens/s" in row
    assert "no: cannot be read" in text
    assert "<b>none" not in html


def test_what_is_suggested_is_judged_by_the_memory_that_is_free(report: ModelsReport) -> None:
    by_name = {line.name: line for line in report.suggested}
    for line in by_name.values():
        assert line.fits == (line.weights_bytes < report.free_bytes)
        assert not line.is_kept
    assert by_name["Qwen/Qwen3-0.6B"].tokens_per_second == pytest.approx(1e6 / 1.2e9)
    assert by_name["all-minilm-l6-v2"].tokens_per_second is None


def test_the_speed_of_memory_is_measured() -> None:
    assert fit_probe.read_speed(torch.device("cpu")) > 0


def test_directories_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalogue.DIRECTORIES_VARIABLE, "/a::/b")
    assert catalogue.named_directories() == ["/a", "/b"]
