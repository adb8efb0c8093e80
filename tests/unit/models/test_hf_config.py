"""The configuration of the decoder, device and dtype follow from config.json and its siblings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_cases import FULL, SLIDING
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from nbengine.config import ModelConfig
from nbengine.errors import InvalidArgumentError, ModelLoadError
from nbengine.kernels.torch.dense import TiledProducts
from nbengine.models import loading
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import hf_config
from nbengine.models.configs.hf_config import (
    eos_token_ids,
    load_generation_config,
    load_hf_config,
    max_model_len_of,
    usual_model_len_of,
    vocab_size,
)
from nbengine.models.configs.rope_config import RopeScaling
from nbengine.models.loading import resolve_device, resolve_dtype
from nbengine.models.registry import decoder_config

CPU = torch.device("cpu")


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(json.dumps(content))


def test_overrides_replace_entries_of_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"vocab_size": 10, "rope_parameters": {"rope_theta": 1.0}})
    config = ModelConfig("m", directory=str(tmp_path), hf_overrides={"vocab_size": 20})
    assert load_hf_config(config) == {"vocab_size": 20, "rope_parameters": {"rope_theta": 1.0}}


ORIGINAL = "original_max_position_embeddings"
YARN, LINEAR = {"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("stated", "overrides", "expected"),
    [
        ({"rope_parameters": YARN, "rope_scaling": LINEAR}, {}, LINEAR),
        ({"rope_parameters": YARN, "rope_scaling": None}, {}, YARN),
        # What is overridden counts under either name, with the base of the file.
        (
            {"rope_parameters": {**LINEAR, "rope_theta": 7.0}},
            {"rope_scaling": YARN},
            {**YARN, "rope_theta": 7.0},
        ),
        ({"rope_theta": 7.0, "rope_scaling": LINEAR}, {"rope_parameters": YARN}, YARN),
        (
            {"rope_parameters": {**YARN, "rope_theta": 7.0}},
            {"rope_theta": 8.0},
            {**YARN, "rope_theta": 8.0},
        ),
        ({"rope_scaling": YARN}, {"rope_scaling": None}, None),
        (
            {"rope_parameters": {FULL: YARN, SLIDING: LINEAR}},
            {"rope_theta": 8.0},
            {FULL: YARN, SLIDING: LINEAR},
        ),
        # So does the part of a head that is turned.
        (
            {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}},
            {"rope_scaling": YARN},
            {**YARN, "partial_rotary_factor": 0.5},
        ),
        ({"rope_parameters": {**LINEAR, "rope_theta": 7.0}}, {"rope_scaling": None}, {"rope_theta": 7.0}),
        # A base alone does not say that there is no scaling, which a family may assume.
        ({}, {"rope_theta": 8.0}, None),
        # The text of a model with images.
        (
            {"text_config": {"rope_parameters": {**LINEAR, "rope_theta": 7.0}}},
            {"text_config": {"rope_parameters": YARN}},
            {**YARN, "rope_theta": 7.0},
        ),
        (
            {"text_config": {"rope_parameters": LINEAR}},
            {"text_config": {"rope_parameters": LINEAR}, "rope_parameters": YARN},
            YARN,
        ),
    ],
)
def test_what_is_said_of_rotary_embeddings_counts_under_either_name(
    stated: dict[str, Any], overrides: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    write(tmp_path, "config.json", stated)
    found = load_hf_config(ModelConfig("m", directory=str(tmp_path), hf_overrides=overrides))
    assert found.get("rope_parameters") == expected
    assert "rope_scaling" not in found
    base = overrides.get("rope_theta", stated.get("rope_theta"))
    assert found.get("rope_theta") == base


def test_overrides_of_a_text_part_replace_its_entries_alone(tmp_path: Path) -> None:
    text = {"model_type": "text", "vocab_size": 10, "hidden_size": 8}
    write(tmp_path, "config.json", {"model_type": "both", "vocab_size": 11, "text_config": text})
    overrides = {"text_config": {"model_type": "other", "vocab_size": 20}}
    found = load_hf_config(ModelConfig("m", directory=str(tmp_path), hf_overrides=overrides))
    assert (found["model_type"], found["vocab_size"], found["hidden_size"]) == ("both", 20, 8)
    assert found["text_config"] == {**text, **overrides["text_config"]}


def test_an_unresolved_model_has_no_configuration() -> None:
    with pytest.raises(ModelLoadError, match="not been looked for"):
        load_hf_config(ModelConfig("m"))


@pytest.mark.parametrize("content", ["", "[1]", "{", "\x00", "[" * 100_000])
def test_a_configuration_that_is_no_json_object_is_refused_with_its_path(
    content: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_hf_config(ModelConfig("m", directory=str(tmp_path)))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, 4096),
        ({"sliding_window": None}, 4096),
        ({"sliding_window": 1024}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 4096),
        # The original context beside the scaling counts before that within.
        ({"rope_parameters": {"rope_type": "yarn", "factor": 16.0}, ORIGINAL: 512}, 8192),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 4096}, ORIGINAL: 512}, 4096),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}, ORIGINAL: 512}, 8192),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": None,
                    "original_max_position_embeddings": 64,
                }
            },
            4096,
        ),
        # Vicuna 16k, LongChat: the context of the model that was stretched.
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1.5, "rope_theta": 1e5}}, 6144),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        # The longer context is counted already.
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 4096),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}},
            4096,
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 8.0, "original_max_position_embeddings": 512}},
            4096,
        ),
        ({"rope_parameters": {"rope_type": "default", "factor": 8.0}}, 4096),
        # One for each type of layer.
        (
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "yarn",
                        "factor": 8.0,
                        "original_max_position_embeddings": 1024,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            8192,
        ),
    ],
)
def test_the_longest_sequence_is_the_context_which_scaled_rotary_embeddings_lengthen(
    entries: dict[str, Any], expected: int
) -> None:
    """As vLLM derives it, but that a stated context is never shortened."""
    hf = {"max_position_embeddings": 4096, **entries}
    assert max_model_len_of(hf) == expected
    is_dynamic = "dynamic" in str(entries)
    assert usual_model_len_of(hf) == (4096 if is_dynamic else expected)


@pytest.mark.parametrize("factor", [0, -1, "4", True])
def test_a_factor_that_is_no_positive_number_is_refused(factor: Any) -> None:
    hf = {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": factor}}
    with pytest.raises(ModelLoadError, match="factor must be a positive number"):
        max_model_len_of(hf)


def test_sizes_that_are_missing_are_named() -> None:
    with pytest.raises(ModelLoadError, match="max_position_embeddings"):
        max_model_len_of({})
    with pytest.raises(ModelLoadError, match="vocab_size must be a positive integer, got 0"):
        vocab_size({"vocab_size": 0})


def test_end_tokens_come_from_the_first_source_that_states_them(tmp_path: Path) -> None:
    directory = str(tmp_path)
    assert load_generation_config(directory) == {}
    assert eos_token_ids(directory, {}, {}) == []
    write(tmp_path, "tokenizer.json", {"added_tokens": [{"id": 5, "content": "</s>"}]})
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "</s>"}})
    assert eos_token_ids(directory, {}, {}) == [5]
    assert eos_token_ids(directory, {"eos_token_id": 6}, {}) == [6]
    write(tmp_path, "generation_config.json", {"eos_token_id": [8, 7, 8]})
    assert eos_token_ids(directory, {"eos_token_id": 6}, {}) == [8, 7]
    assert eos_token_ids(directory, {"eos_token_id": 9}, {"eos_token_id": 9}) == [9]


@pytest.mark.parametrize("stated", ["</s>", -1, [1, None], True])
def test_end_tokens_that_are_no_ids_are_refused(stated: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="eos_token_id must be"):
        eos_token_ids(str(tmp_path), {"eos_token_id": stated}, {})


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("entries", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_theta": 7.0, "rope_scaling": None}, 7.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10000.0, RopeScaling("linear", factor=2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            5e5,
            RopeScaling("linear", factor=4.0),
        ),
    ],
)
def test_rope_is_read_in_the_old_and_the_new_form(
    entries: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    config = decoder_config({**LLAMA, **entries})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_device_auto_is_the_cpu_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(ModelConfig()) == CPU
    with pytest.raises(InvalidArgumentError, match="no CUDA device is available"):
        resolve_device(ModelConfig(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(ModelConfig()).type == "cuda"
    assert resolve_device(ModelConfig(device="cpu")) == CPU


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "torch.bfloat16", "torch_dtype": "float32"}, torch.bfloat16),
    ],
)
def test_dtype_auto_is_the_checkpoints_on_the_cpu(stated: dict[str, str], expected: torch.dtype) -> None:
    assert resolve_dtype(ModelConfig(weights=("model.safetensors",)), stated, CPU) is expected


def test_dtype_auto_is_that_of_most_numbers_where_nothing_is_stated(tmp_path: Path) -> None:
    def dtype_of(**tensors: torch.Tensor) -> torch.dtype:
        save_file(tensors, tmp_path / "model.safetensors")
        return resolve_dtype(ModelConfig(weights=(str(tmp_path / "model.safetensors"),)), {}, CPU)

    wide, short = torch.zeros(9), torch.zeros(5, 2, dtype=torch.bfloat16)
    assert dtype_of(norm=wide, matrix=short, ids=torch.zeros(99, dtype=torch.int64)) is torch.bfloat16
    assert dtype_of(norm=wide, matrix=short[:4]) is torch.float32
    assert dtype_of(ids=torch.zeros(99, dtype=torch.int64)) is torch.float32
    assert resolve_dtype(ModelConfig(), {}, CPU) is torch.float32
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match="is truncated, corrupt or no safetensors file"):
        resolve_dtype(ModelConfig(weights=(str(tmp_path / "model.safetensors"),)), {}, CPU)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("Llama", {}, torch.float16),
        (
            "GraniteMoeHybrid",
            {"num_local_experts": 0, "layer_types": ["mamba", "attention"] * 16},
            torch.float16,
        ),
        ("Mixtral", {}, torch.float32),
        ("StableLm", {}, torch.float32),
        ("Bert", {}, torch.float32),
    ],
)
def test_float16_stays_on_the_cpu_where_activations_are_not_rounded_to_it(
    kind: str, settings: dict[str, Any], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = getattr(transformers, f"{kind}Config")(**settings).to_dict()
    config["architectures"] = [f"{kind}Model" if kind == "Bert" else f"{kind}ForCausalLM"]
    stated = {**config, "dtype": "float16"}
    safetensors = ModelConfig(weights=("model.safetensors",))
    assert resolve_dtype(safetensors, stated, CPU) is expected
    monkeypatch.setattr(loading, "select_dense", lambda *_: TiledProducts())
    assert resolve_dtype(safetensors, stated, CPU) is torch.float32


def test_an_unknown_dtype_is_refused_and_a_given_one_taken() -> None:
    with pytest.raises(ModelLoadError, match="got 'int8'"):
        resolve_dtype(ModelConfig(), {"dtype": "int8"}, CPU)
    assert resolve_dtype(ModelConfig(dtype="float16"), {"dtype": "int8"}, CPU) is torch.float16


CPU_INFO = [
    ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", torch.bfloat16),
    ("flags\t\t: fpu avx2 avx512f avx512_bf16x", torch.float32),
    ("Features\t: fp asimd bf16 i8mm", torch.bfloat16),
    ("", torch.float32),
]


@pytest.fixture
def gguf_of(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> Callable[..., tuple[ModelConfig, dict[str, Any]]]:
    def make(kind: Kind, dense: str = "no matrix") -> tuple[ModelConfig, dict[str, Any]]:
        variant = gguf_variant(arch="llama", weight_type=kind, dense=dense)
        model = random_model("Llama", hidden_size=256, intermediate_size=256)
        path = write_gguf(tmp_path / "model.gguf", model, variant)
        return ModelConfig(weights=(str(path),)), hf_config(read_header(path))

    return make


@pytest.mark.parametrize(("cpu_info", "expected"), CPU_INFO)
def test_dtype_auto_of_a_gguf_is_what_the_cpu_multiplies_fast(
    cpu_info: str, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_of: Any
) -> None:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(loading, "_CPU_INFO", path)
    gguf = gguf_of(Kind.Q4_0)
    assert resolve_dtype(*gguf, CPU) is torch.float32
    path.write_text(f"processor\t: 0\n{cpu_info}\n")
    assert resolve_dtype(*gguf, CPU) is expected


@pytest.mark.parametrize(
    ("kind", "dense", "expected"),
    [
        (Kind.F16, "no matrix", torch.float16),
        (Kind.BF16, "no matrix", torch.bfloat16),
        (Kind.F32, "no matrix", torch.float32),
        (Kind.F16, "o_proj", torch.float32),
        (Kind.Q8_0, "no matrix", torch.float32),
        # There are no products with these blocks.
        (Kind.TQ2_0, "no matrix", torch.float16),
        (Kind.TQ2_0, "o_proj", torch.bfloat16),
    ],
)
def test_a_gguf_keeps_or_gets_16_bits_where_none_are_multiplied_fast(
    kind: Kind, dense: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, gguf_of: Any
) -> None:
    monkeypatch.setattr(loading, "cpu_has_bf16_products", lambda: False)
    gguf = gguf_of(kind, dense)
    assert resolve_dtype(*gguf, CPU) is expected
    monkeypatch.setattr(loading, "select_dense", lambda *_: TiledProducts())
    assert resolve_dtype(*gguf, CPU) is torch.float32
    monkeypatch.setattr(loading, "cpu_has_bf16_products", lambda: True)
    assert resolve_dtype(*gguf, CPU) is torch.bfloat16


def test_blocks_without_products_have_bfloat16_where_float16_is_not_converted(
    monkeypatch: pytest.MonkeyPatch, gguf_of: Any
) -> None:
    monkeypatch.setattr(loading, "cpu_has_bf16_products", lambda: False)
    select = loading.select_dense
    monkeypatch.setattr(
        loading,
        "select_dense",
        lambda device, dtype: TiledProducts() if dtype is torch.float16 else select(device, dtype),
    )
    config, stated = gguf_of(Kind.TQ2_0)
    assert resolve_dtype(config, stated, CPU) is torch.bfloat16
    assert resolve_dtype(replace(config, dtype="float32"), stated, CPU) is torch.float32


@pytest.mark.parametrize(("supported", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_dtype_auto_on_cuda_is_bfloat16_where_it_is_supported(
    supported: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    cuda = torch.device("cuda")
    assert resolve_dtype(ModelConfig(weights=("model.gguf",)), {}, cuda) is expected
    assert resolve_dtype(ModelConfig(), {"dtype": "bfloat16"}, cuda) is expected
    assert resolve_dtype(ModelConfig(), {"dtype": "float16"}, cuda) is torch.float16
