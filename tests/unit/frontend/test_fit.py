"""The report of `nbengine.fit`, models on the hub of which only the configuration is fetched, and GPUs by rehearsal."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import psutil
import pytest
import torch

import nbengine
from nbengine.config import EngineArgs
from nbengine.engine import fit_probe
from nbengine.engine.fit_probe import answer
from nbengine.errors import InvalidArgumentError, ModelNotFoundError, NBEngineError
from nbengine.ipc.fit import FitAnswers, FitQuestion
from nbengine.kv_cache.specs import FULL, LayerRule, make_groups
from nbengine.models.checkpoints import hub
from nbengine.models.checkpoints.files import resolve_configuration, resolve_model
from nbengine.models.loading import Precision
from nbengine.widgets.processes.fit_report import FitReport, MemoryPlace, TensorParallelFit
from nbengine.worker.memory.budget import GPUProfile
from nbengine.worker.memory.extras import decoder_extras

GIB = 1 << 30
REPORT = FitReport(
    model="<b>model</b>",
    device="cpu",
    dtype="float32",
    file_bytes=GIB,
    weights_bytes=2 * GIB,
    page_bytes=16 * 1024,
    block_size=16,
    num_blocks=1000,
    max_model_len=4096,
    context_limit=8192,
    max_num_seqs=20,
    memory=(MemoryPlace("CPU memory", 16 * GIB, 8 * GIB),),
    tensor_parallel=(
        TensorParallelFit(1, 2 * GIB, 1024, 1000, ""),
        TensorParallelFit(2, GIB, 512, 0, "no <i>room</i>"),
    ),
)


def test_a_report_counts_the_requests_that_its_blocks_hold() -> None:
    assert (REPORT.fits, REPORT.kv_cache_bytes, REPORT.kv_bytes_per_token) == (True, 16_384_000, 1024)
    assert [REPORT.concurrency(length) for length in (1, 800, 801, 4096, 4097)] == [20, 20, 19, 3, 0]
    text, html = REPORT.tables()
    assert str(REPORT) == text
    assert "4,096 tokens of the model's 8,192 tokens" in text
    assert "2 GiB of float32, 1 GiB on disk" in text
    assert "2,048 tokens  7" in text
    assert "no <i>room</i>" in text
    assert "<i>" not in html
    assert "<b>model</b>" not in html
    assert REPORT._repr_html_() == html


def test_a_report_counts_groups_and_slots() -> None:
    groups = make_groups([FULL, LayerRule("window", 64), LayerRule("recurrent", 1000)])
    report = replace(REPORT, groups=groups, slot_bytes=2 << 20, num_state_slots=12)
    # A token takes a part of a block in each of two groups, but of the window no more than 5 blocks.
    assert report.kv_bytes_per_token == 2 * 1024
    assert [report.concurrency(length) for length in (1, 1600, 4096)] == [12, 9, 3]
    assert replace(report, num_spare_slots=4).concurrency(1) == 8
    assert report.kv_cache_bytes == 16_384_000 + 12 * (2 << 20)
    assert "2 MiB a request, 12 slots (24 MiB)" in str(report)
    assert "1,000 blocks of 16 tokens (15.6 MiB)" in str(report)


def test_tokens_of_several_groups_share_the_blocks() -> None:
    sizes = (
        TensorParallelFit(1, 2 * GIB, 1024, 1000, "", num_tables=4),
        TensorParallelFit(2, GIB, 512, 2000, "", num_tables=4),
    )
    text = str(replace(REPORT, tensor_parallel=sizes))
    assert "4,000 tokens of KV cache" in text
    assert "8,000 tokens of KV cache" in text


def test_a_report_of_states_alone_counts_their_slots() -> None:
    groups = make_groups([LayerRule("recurrent", 1000)])
    sizes = tuple(TensorParallelFit(size, GIB, 0, 0, "", num_tables=0) for size in (1, 2))
    report = replace(
        REPORT, groups=groups, page_bytes=0, num_blocks=0, slot_bytes=2 << 20, num_state_slots=12
    )
    text = str(replace(report, tensor_parallel=sizes))
    assert "2,048 tokens  12" in text
    assert "of KV cache" not in text


def test_a_report_of_what_does_not_fit_says_why_and_what_would() -> None:
    report = replace(REPORT, problem="it is too large", advice="--dtype bfloat16", num_blocks=0)
    assert report.verdict == "<b>model</b> does not fit, because it is too large; try --dtype bfloat16"
    assert report.concurrency(1) == 0
    assert "AT ONCE" not in str(report)
    bare = FitReport("gone", problem="no such architecture")
    assert str(bare) == "gone does not fit, because no such architecture"


def test_a_model_that_is_not_there_is_an_error_and_one_that_cannot_be_read_a_verdict(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        nbengine.fit("no-such-model")
    with pytest.raises(InvalidArgumentError, match="max_num_seqs must be at least 1"):
        nbengine.fit("random-tiny", max_num_seqs=0)
    assert "has no weights" in nbengine.fit(str(tmp_path)).problem


def test_a_probe_that_crashes_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = subprocess.CompletedProcess([], 1, b"", b"Traceback\nMemoryError: all gone\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: crash)
    with pytest.raises(
        NBEngineError, match="cannot work out whether 'random-tiny' fits: MemoryError: all gone"
    ):
        nbengine.fit("random-tiny")


def resolved(**arguments: Any) -> Any:
    config = EngineArgs.from_kwargs({"model": "random-tiny", **arguments}).create_engine_config(bound=True)
    return replace(config, model=resolve_model(config.model))


def test_memory_that_is_short_is_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_probe, "free_memory", lambda device: 400_000)
    (plan,) = answer(FitQuestion([resolved()])).plans
    assert "does not fit on cpu: its weights take about 490 KiB" in plan.problem
    monkeypatch.setattr(fit_probe, "free_memory", lambda device: 100 << 20)
    few, asked, many = answer(
        FitQuestion([resolved(), resolved(num_gpu_blocks_override=20_000), resolved(data_parallel_size=2)])
    ).plans
    weights = few.weights_bytes
    assert few.num_blocks == ((100 << 20) - weights) // 4 // few.page_bytes
    assert "the KV cache does not fit" in asked.problem
    other_process = psutil.Process().memory_full_info().uss
    assert many.problem.startswith("model 'random-tiny' does not fit") == (
        other_process + weights > 100 << 20
    )


def test_broken_files_are_the_verdict_of_all(tmp_path: Path) -> None:
    config = resolved()
    cut = tmp_path / "model.safetensors"
    cut.write_bytes(Path(config.model.weights[0]).read_bytes()[:5000])
    broken = replace(config, model=replace(config.model, weights=(str(cut),)))
    assert "is truncated, corrupt or no safetensors file" in answer(FitQuestion([broken])).problem


def test_gpus_are_planned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(index: int) -> tuple[int, int]:
        return (9 - index) * GIB, 10 * GIB

    monkeypatch.setattr(fit_probe, "resolve_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(fit_probe, "resolve_dtype", lambda *args: torch.float32)
    monkeypatch.setattr(fit_probe, "resolve_precision", lambda *args: Precision(torch.float32, torch.float32))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "test GPU")
    monkeypatch.setattr(fit_probe, "profile_gpu", lambda *args: GPUProfile(10 * GIB, 3 * GIB, GIB))
    layer = SimpleNamespace(weights_bytes=2 * GIB)
    monkeypatch.setattr(fit_probe, "make_model", lambda *args: layer)
    runners: list[Any] = []
    monkeypatch.setattr(fit_probe, "ModelRunner", lambda *args: runners.append(args) or object())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = answer(
        FitQuestion([resolved(), resolved(tensor_parallel_size=2), resolved(tensor_parallel_size=4)])
    )
    one, two, four = found.plans
    assert [(place.name, place.free) for place in found.places] == [
        ("cuda:0 (test GPU)", 9 * GIB),
        ("cuda:1 (test GPU)", 8 * GIB),
    ]
    # Nine tenths of the GPU, without weights, one layer's activations (3 - 2 GiB) and what others hold. Beside each page there
    # is room for the log probabilities of 16 prompt tokens: 21 ids and numbers, the next token's id, its rank.
    gathered = 16 * (21 * (8 + 4) + 8 + 8)
    assert one.num_blocks == (int(9 * GIB) - one.weights_bytes - GIB - GIB) // (one.page_bytes + gathered)
    assert one.max_model_len == 2048
    rank_weights, rank_page = two.weights_bytes // 2, two.page_bytes // 2
    assert two.num_blocks == (int(9 * GIB) - rank_weights - GIB - 2 * GIB) // (rank_page + gathered)
    assert four.problem == "it needs 4 GPUs, and there are 2"
    # Decode steps are recorded where one worker computes them, and their memory is counted there alone.
    assert [arguments[-1] is not None for arguments in runners] == [True, False]


class Hub:
    """A hub of one repository, and what has been downloaded from it."""

    def __init__(self, directory: Path, names: dict[str, int]) -> None:
        self.directory = directory
        self.names = names
        self.patterns: list[list[str]] = []

    def model_info(self, *args: object, **kwargs: object) -> Any:
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in self.names.items()]
        )

    def snapshot_download(self, repository: str, *, allow_patterns: list[str], **_: object) -> str:
        self.patterns.append(allow_patterns)
        self.directory.mkdir(exist_ok=True)
        source = Path(resolved().model.directory)
        for name in allow_patterns:
            (self.directory / name).write_bytes((source / name).read_bytes())
        return str(self.directory)


@pytest.fixture
def a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    names = {
        "config.json": 700,
        "tokenizer.json": 9,
        "model.safetensors": 123,
        "model-2.safetensors": 77,
        "x.bin": 5,
    }
    found = Hub(tmp_path / "snapshot", names)
    monkeypatch.setattr(hub, "cached_snapshot", lambda *args: None)
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    return found


def test_of_a_model_on_the_hub_only_the_configuration_is_fetched(a_hub: Hub) -> None:
    config = EngineArgs(model="owner/model").create_engine_config(bound=True)
    found, file_bytes = resolve_configuration(config.model)
    assert a_hub.patterns == [["config.json"]]
    assert (found.directory, found.weights, file_bytes) == (str(a_hub.directory), (), 200)
    (plan,) = answer(FitQuestion([replace(config, model=found)])).plans
    assert plan.weights_bytes == answer(FitQuestion([resolved()])).plans[0].weights_bytes
    assert not plan.problem


def test_a_repository_without_a_configuration_says_what_to_do(
    a_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_hub.names = {"model-q4.gguf": 10}
    assert "`nbengine fetch owner/model` downloads them" in nbengine.fit("owner/model").problem
    monkeypatch.setattr(hub, "is_offline", lambda: True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set"):
        nbengine.fit("owner/model")


def test_advice_is_what_was_tried_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(questions: list[FitQuestion]) -> FitAnswers:
        extras = decoder_extras(questions[0].configs[0].scheduler, 256, 64, 64)
        monkeypatch.setattr(fit_probe, "free_memory", lambda device: 450_000 + extras)
        return FitAnswers(list(map(answer, questions)))

    monkeypatch.setattr("nbengine.frontend.fit._ask", ask)
    report = nbengine.fit("random-tiny", num_gpu_blocks_override=4, max_model_len=64)
    assert not report.fits
    assert report.advice == "--dtype bfloat16"
    assert [each.tensor_parallel_size for each in report.tensor_parallel] == [1, 2, 4]
    assert not any(each.fits for each in report.tensor_parallel)
