"""A worker keeps quantised weights as they are, or rounds them, counts what they take, and has them again after sleep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from nbengine.config import CacheConfig, EngineConfig, ModelConfig
from nbengine.errors import ModelLoadError
from nbengine.kernels.cpu.integers import QuadProduct
from nbengine.kernels.cpu.jit import host_processor
from nbengine.models import loading
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.loading import make_model, packed_formats, resolve_precision
from nbengine.worker.worker import Worker
from tests.unit.models.quantized_checkpoints import VARIANTS, write_checkpoint


@dataclass(frozen=True)
class Source:
    """A model with 23 matrices that stay quantised, or fewer, and how to load it."""

    path: Path
    held: str
    num_packed: int = 2 + 3 * 7
    """Embedding, output projection, and of each of three layers seven projections."""
    asked: dict[str, str] = field(default_factory=dict)
    share: float = 0.25
    """The most that its weights take, of those in float32."""


@pytest.fixture(scope="module")
def sources(
    tmp_path_factory: pytest.TempPathFactory, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> Iterator[dict[str, Source]]:
    """Models in a cache of their own, for all tests here: a tokenizer is converted once."""
    directory = tmp_path_factory.mktemp("quantized")
    plain, awq, gptq = (directory / name for name in ("plain", "awq", "gptq"))
    model = random_model("Qwen2", vocab_size=260, hidden_size=128)
    model.save_pretrained(plain)
    write_checkpoint(awq, random_model("Qwen2", vocab_size=260, hidden_size=128), VARIANTS["awq 64"])
    write_checkpoint(gptq, random_model("Qwen2", vocab_size=260, hidden_size=128), VARIANTS["gptq 8"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBENGINE_CACHE_DIR", str(directory / "cache"))
        variant = gguf_variant(arch="qwen2", weight_type=Kind.Q4_1, vocabulary=260)
        of_gguf = write_gguf(directory / "model.gguf", model, variant)
        yield {
            "gguf": Source(of_gguf, "q4_1 23"),
            "int4": Source(plain, "q4_1 23", asked={"quantization": "int4"}),
            "int8": Source(plain, "q8_0 23", asked={"quantization": "int8"}, share=0.35),
            "awq": Source(awq, "q4_z 21, float32 2", num_packed=21, share=0.45),
            "gptq": Source(gptq, "q8_z 21, float32 2", num_packed=21, share=0.5),
        }


@pytest.fixture(params=["gguf", "int4", "int8", "awq", "gptq"])
def source(request: pytest.FixtureRequest, sources: dict[str, Source]) -> Source:
    return sources[request.param]


def resolved(path: Path, **settings: Any) -> ModelConfig:
    return resolve_model(ModelConfig(model=str(path), tokenizer="none", device="cpu", **settings))


def loaded(path: Path, **settings: Any) -> Worker:
    worker = Worker(EngineConfig(resolved(path, **settings)))
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(16)
    return worker


def num_packed(worker: Worker) -> int:
    assert isinstance(worker.model, DecoderForCausalLM)
    return sum(slot.form is not None for slot in worker.model.weight_slots().values())


def test_matrices_stay_quantised_unless_float32_is_asked_for(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "nbengine.models.checkpoints.loader"):
        assert num_packed(loaded(source.path, **source.asked)) == source.num_packed
    kind, *others = source.held.split(", ")
    assert f"matrices by type: {kind}" in caplog.text
    assert ("; in " in caplog.text) == bool(others)
    assert num_packed(loaded(source.path, dtype="bfloat16", **source.asked)) == source.num_packed
    assert num_packed(loaded(source.path, dtype="float32")) == 0


def test_what_weights_will_take_is_what_they_take(source: Source) -> None:
    worker = loaded(source.path, dtype="bfloat16", **source.asked)
    assert worker._footprint.weights_bytes == worker.model.weights_bytes
    exact = loaded(source.path, dtype="float32").model.weights_bytes
    assert worker.model.weights_bytes < source.share * exact


@pytest.mark.parametrize("levels", [(1,), (2,), (1, 2)])
def test_quantised_weights_come_back_after_sleep(source: Source, levels: tuple[int, ...]) -> None:
    worker = loaded(source.path, dtype="bfloat16", **source.asked)
    before = [weight.clone() for weight in worker.model.parameters()]
    assert isinstance(worker.model, DecoderForCausalLM)
    steps = worker.model._prepared
    assert steps is not None
    steps._program = "made before"  # type: ignore[assignment]
    for level in levels:
        worker.sleep(level)
    # Their operations point to where the weights were.
    assert steps._program is None
    worker.wake_up("weights")
    worker.wake_up("kv_cache")
    assert all(map(torch.equal, worker.model.parameters(), before))


def test_the_kv_cache_has_16_bits_and_hidden_states_32(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With them it is bfloat16.
    monkeypatch.setattr(loading, "attends_in_pairs", lambda head_dim, block_size: False)

    def types(**settings: Any) -> tuple[torch.dtype, torch.dtype]:
        config = resolved(source.path, **settings)
        found = resolve_precision(config, cache, load_hf_config(config), torch.device("cpu"))
        return found.kv_dtype, found.hidden_dtype

    cache = CacheConfig()

    assert types(**source.asked) == (torch.float16, torch.float32)
    assert types(dtype="bfloat16", **source.asked) == (torch.bfloat16, torch.float32)
    assert types(dtype="float32") == (torch.float32, torch.float32)
    cache = CacheConfig(kv_cache_dtype="int8")
    assert types(**source.asked) == types(dtype="float32") == (torch.int8, torch.float32)


def test_a_worker_names_its_kernels(source: Source) -> None:
    best = QuadProduct.best(host_processor()).value
    assert loaded(source.path, **source.asked).worker_info().kernels == f"cpu, products with {best}"
    assert loaded(source.path, dtype="float32").worker_info().kernels == "cpu"


def test_a_model_without_weights_yet_has_room_for_quantised_ones(source: Source) -> None:
    config, cpu = resolved(source.path, dtype="bfloat16", **source.asked), torch.device("cpu")
    empty = make_model(config, cpu, torch.bfloat16)
    assert empty.weights_bytes == loaded(source.path, dtype="bfloat16", **source.asked).model.weights_bytes
    assert not any(weight.any() for weight in empty.parameters())


def test_on_another_device_weights_are_dense(sources: dict[str, Source]) -> None:
    for name in ("gguf", "awq", "gptq"):
        config = resolved(sources[name].path)
        assert packed_formats(config, torch.device("cuda")).formats == {}
        assert packed_formats(config, torch.device("cpu")).formats


@pytest.mark.parametrize("level", [1, 2])
def test_files_that_have_changed_while_the_engine_slept_are_named(
    level: int, tmp_path: Path, random_model: Any
) -> None:
    write_checkpoint(tmp_path, random_model("Llama"), VARIANTS["gptq 4"])
    worker = loaded(tmp_path)
    worker.sleep(level)
    random_model("Llama").save_pretrained(tmp_path)
    if level == 1:
        worker.wake_up("weights")
        return
    with pytest.raises(ModelLoadError, match=r"model.safetensors: tensor .*_proj.weight is no longer q4_z"):
        worker.wake_up("weights")
