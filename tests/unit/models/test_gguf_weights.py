"""Weights, configuration and quantised blocks of GGUF files, against transformers and the gguf package."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import _type_traits

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.layout import RankLayout
from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import generation_config, hf_config
from nbengine.models.checkpoints.gguf_dequant import dequantize
from nbengine.models.checkpoints.loader import load_decoder
from nbengine.models.configs.pooling_config import longest_model_len
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.weights import ALL_DENSE, PackedFormats
from nbengine.models.registry import decoder_config
from nbengine.runtime.progress import Reporter

TOKENS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(4)).tolist()
QUANTISABLE = [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def load_gguf(
    path: Path, parallel: ParallelState = SINGLE, dtype: torch.dtype = torch.float32
) -> DecoderForCausalLM:
    return load_decoder(
        decoder_config(hf_config(read_header(path))),
        (path,),
        dtype=dtype,
        device=torch.device("cpu"),
        max_positions=None,
        report=Reporter(None, "load"),
        parallel=parallel,
        packed=ALL_DENSE if dtype is torch.float32 else PackedFormats(is_wide=True),
    )


def assert_same_logits(path: Path, oracle: Any, make_runner: Any) -> None:
    logits = make_runner(load_gguf(path)).step({"a": TOKENS})["a"]
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings", "variant"),
    [
        ("Llama", {}, {"arch": "llama", "permute": True}),
        (
            "Llama",
            {"tie_word_embeddings": True, "attention_bias": True},
            {"arch": "llama", "permute": True},
        ),
        ("Qwen2", {}, {"arch": "qwen2"}),
        ("Qwen2", {}, {"arch": "qwen2vl"}),
        ("Qwen3", {"head_dim": 16}, {"arch": "qwen3vl"}),
        ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, {"arch": "qwen3"}),
    ],
)
def test_each_architecture_gives_the_logits_of_transformers(
    kind: str,
    settings: dict[str, Any],
    variant: dict[str, Any],
    tmp_path: Path,
    random_model: Any,
    write_gguf: Any,
    gguf_variant: Any,
    make_runner: Any,
    compared: Any,
) -> None:
    oracle = random_model(kind, **settings)
    path = write_gguf(tmp_path / "model.gguf", oracle, gguf_variant(**variant))
    assert_same_logits(path, oracle, make_runner)
    compared(oracle, "gguf")


@pytest.mark.parametrize(("kind", "arch"), [("Qwen2", "qwen2"), ("Qwen3", "qwen3"), ("Qwen2Moe", "qwen2moe")])
def test_all_layers_have_the_window_that_a_file_of_qwen_states(
    kind: str, arch: str, tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    _, settings, metadata = MIXTURES.get(arch, (kind, {}, {}))
    variant = gguf_variant(arch, metadata={**metadata, f"{arch}.attention.sliding_window": 8})
    path = write_gguf(tmp_path / "model.gguf", random_model(kind, **settings), variant)
    layers = decoder_config(hf_config(read_header(path))).layers
    assert [(layer.attention, layer.size) for layer in layers] == [("window", 8)] * len(layers)
    assert layers


def expert_metadata(arch: str, num_experts: int, per_token: int, **sizes: int) -> dict[str, int]:
    counts = {"expert_count": num_experts, "expert_used_count": per_token, **sizes}
    return {f"{arch}.{key}": value for key, value in counts.items()}


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}, expert_metadata("llama", 5, 3)),
    "qwen2moe": (
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 64},
        expert_metadata("qwen2moe", 6, 2, expert_feed_forward_length=32),
    ),
    "qwen3moe": (
        "Qwen3Moe",
        {**EXPERTS, "norm_topk_prob": True, "head_dim": 16},
        expert_metadata("qwen3moe", 6, 2, expert_feed_forward_length=32),
    ),
    # The text of Qwen3-VL: its experts are those of Qwen 3.
    "qwen3vlmoe": (
        "Qwen3Moe",
        {**EXPERTS, "norm_topk_prob": True, "head_dim": 16},
        expert_metadata("qwen3vlmoe", 6, 2, expert_feed_forward_length=32),
    ),
}


@pytest.mark.parametrize("weight_type", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", MIXTURES)
def test_mixtures_of_experts_give_the_logits_of_transformers(
    arch: str,
    weight_type: Kind,
    tmp_path: Path,
    random_model: Any,
    write_gguf: Any,
    gguf_variant: Any,
    make_runner: Any,
    compared: Any,
) -> None:
    kind, settings, metadata = MIXTURES[arch]
    oracle = random_model(kind, **settings)
    variant = gguf_variant(arch, weight_type, permute=arch == "llama", metadata=metadata)
    path = write_gguf(tmp_path / "model.gguf", oracle, variant)
    name = "Qwen3VLMoeForConditionalGeneration" if arch == "qwen3vlmoe" else type(oracle).__name__
    assert hf_config(read_header(path))["architectures"] == [name]
    if weight_type is Kind.F32:
        assert_same_logits(path, oracle, make_runner)
        compared(name, "gguf")
        return
    for weight in oracle.state_dict().values():
        if weight.dim() == 3:
            rounded = gguf.dequantize(gguf.quantize(weight.numpy(), weight_type), weight_type)
            weight.copy_(torch.from_numpy(rounded))
    slots = load_gguf(path).weight_slots()
    experts = oracle.model.layers[1].mlp.experts
    for expert in range(oracle.config.num_experts):
        gate, up = experts.gate_up_proj[expert].chunk(2)
        for projection, expected in (("gate", gate), ("up", up), ("down", experts.down_proj[expert])):
            slot = slots[f"model.layers.1.mlp.experts.{expert}.{projection}_proj.weight"]
            assert torch.equal(slot.tensor, expected)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_workers_of_all_engine_cores_read_their_parts_of_a_files_experts(
    expert_parallel: bool, tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    kind, settings, metadata = MIXTURES["qwen3moe"]
    variant = gguf_variant("qwen3moe", Kind.Q8_0, metadata=metadata)
    path = write_gguf(tmp_path / "model.gguf", random_model(kind, **settings), variant)
    whole = load_gguf(path).weight_slots()
    seen: dict[str, int] = {}
    for rank in range(4):
        layout = RankLayout(rank % 2, 2, dp_rank=rank // 2, dp_size=2, expert_parallel=expert_parallel)
        for name, slot in load_gguf(path, ParallelState(layout)).weight_slots().items():
            assert torch.equal(slot.tensor, whole[name].tensor[slot.index])
            if ".experts." in name:
                seen[name] = seen.get(name, 0) + slot.tensor.numel()
    assert seen == {name: slot.tensor.numel() for name, slot in whole.items() if ".experts." in name}


@pytest.mark.parametrize("weight_type", QUANTISABLE, ids=lambda kind: kind.name)
def test_quantised_weights_give_the_logits_of_their_rounded_values(
    weight_type: Kind,
    tmp_path: Path,
    random_model: Any,
    write_gguf: Any,
    gguf_variant: Any,
    make_runner: Any,
) -> None:
    oracle = random_model("Llama")
    variant = gguf_variant(arch="llama", permute=True, weight_type=weight_type)
    path = write_gguf(tmp_path / "model.gguf", oracle, variant)
    with torch.no_grad():
        for parameter in oracle.parameters():
            if parameter.dim() == 2:
                blocks = gguf.quantize(parameter.numpy(), weight_type)
                parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, weight_type)))
    assert_same_logits(path, oracle, make_runner)


def llama_cpp_factors(head_dim: int, theta: float, scaling: dict[str, float]) -> np.ndarray[Any, Any]:
    """The factors that llama.cpp's converter writes for Llama 3.1, one frequency at a time."""
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(scaling["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def test_rope_factors_of_llama_3_give_the_logits_of_transformers(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any, make_runner: Any
) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    oracle = random_model(
        "Llama", rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **scaling}, head_dim=16
    )
    factors = llama_cpp_factors(16, 500.0, scaling)
    assert len(set(factors.tolist())) > 3
    variant = gguf_variant(arch="llama", permute=True, extra_tensors={"rope_freqs.weight": factors})
    assert_same_logits(write_gguf(tmp_path / "model.gguf", oracle, variant), oracle, make_runner)


def test_linear_rope_scaling_gives_the_logits_of_transformers(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any, make_runner: Any
) -> None:
    oracle = random_model("Llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    variant = gguf_variant(arch="llama", permute=True, metadata=metadata)
    path = write_gguf(tmp_path / "model.gguf", oracle, variant)
    assert_same_logits(path, oracle, make_runner)
    context = oracle.config.max_position_embeddings
    assert longest_model_len(hf_config(read_header(path))) == 4 * context
    stated = {**metadata, "llama.rope.scaling.original_context_length": context // 4}
    path = write_gguf(
        tmp_path / "stated.gguf", oracle, gguf_variant(arch="llama", permute=True, metadata=stated)
    )
    assert longest_model_len(hf_config(read_header(path))) == context


@pytest.mark.parametrize("kind", list(_type_traits), ids=lambda kind: kind.name)
def test_every_block_type_dequantises_to_the_bits_of_the_reference(kind: Kind) -> None:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (40_960 // block_size, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, kind).reshape(-1)
        values = dequantize(torch.from_numpy(blocks.reshape(-1)), kind).float().numpy()
    is_number = ~np.isnan(expected)
    assert np.array_equal(is_number, ~np.isnan(values))
    assert np.array_equal(values[is_number].view(np.uint32), expected[is_number].view(np.uint32))


def test_a_file_says_which_part_of_a_head_turns_whatever_the_class_of_transformers_does(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    variant = gguf_variant("qwen2", metadata={"qwen2.rope.dimension_count": 8})
    path = write_gguf(tmp_path / "model.gguf", random_model("Qwen2"), variant)
    assert decoder_config(hf_config(read_header(path))).rotary_dim == 8


def test_a_block_type_without_dequantisation_is_refused_by_name() -> None:
    _, block_bytes = GGML_QUANT_SIZES[Kind.Q8_K]
    with pytest.raises(ModelLoadError, match="Q8_K"):
        dequantize(torch.zeros(block_bytes, dtype=torch.uint8), Kind.Q8_K)


@pytest.fixture
def of_ternary_blocks(tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any) -> Path:
    """A file whose blocks have no products."""
    oracle = random_model("Qwen2", hidden_size=256, intermediate_size=256)
    variant = gguf_variant(arch="qwen2", weight_type=Kind.TQ2_0)
    path: Path = write_gguf(tmp_path / "model.gguf", oracle, variant)
    return path


def test_blocks_without_products_are_held_in_16_bits_and_one_line_says_so(
    of_ternary_blocks: Path, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        short = load_gguf(of_ternary_blocks, dtype=torch.float16)
    matrices = len([slot for slot in short.weight_slots().values() if len(slot.full_shape) == 2])
    assert f"matrices by type: float16 {matrices}; in float16: " in caplog.text
    exact = load_gguf(of_ternary_blocks)
    assert short.weights_bytes < 0.52 * exact.weights_bytes
    # A level times a scale of 16 bits is a number of float16.
    logits, expected = (make_runner(model).step({"a": TOKENS})["a"] for model in (short, exact))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-2)


def test_numbers_of_blocks_that_float16_does_not_hold_are_refused_with_the_tensor(
    of_ternary_blocks: Path,
) -> None:
    tensor = read_header(of_ternary_blocks).tensors["blk.1.ffn_down.weight"]
    contents = bytearray(of_ternary_blocks.read_bytes())
    largest = np.float16(65504).tobytes()
    end = tensor.offset + GGML_QUANT_SIZES[Kind.TQ2_0][1]
    # The levels are from -1 to 2: the largest is given, too.
    contents[tensor.offset : end] = b"\xff" * (end - tensor.offset - 2) + largest
    of_ternary_blocks.write_bytes(contents)
    named = r"model\.layers\.1\.mlp\.down_proj\.weight has numbers beyond the largest of float16"
    with pytest.raises(ModelLoadError, match=named):
        load_gguf(of_ternary_blocks, dtype=torch.float16)
    load_gguf(of_ternary_blocks)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"split.count": 3}}, "llama-gguf-split"),
    ({"arch": "qwen3", "metadata": {"qwen3.expert_count": 8}}, "mixture-of-experts"),
    ({"metadata": {"llama.rope.scaling.type": "su"}}, "RoPE scaling 'su' is not supported"),
    ({"metadata": {"llama.rope.dimension_count": 8}}, "8 of 16 dimensions"),
    ({"extra_tensors": {"rope_freqs.weight": np.ones(5, np.float32)}}, "5 RoPE frequency factors"),
    ({"extra_tensors": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "blk.0.attn_sinks.weight"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_the_decoder_does_not_do_is_refused(
    settings: dict[str, Any],
    message: str,
    tmp_path: Path,
    random_model: Any,
    write_gguf: Any,
    gguf_variant: Any,
) -> None:
    variant = gguf_variant(**{"arch": "llama", "permute": True, **settings})
    path = write_gguf(tmp_path / "model.gguf", random_model("Llama", head_dim=16), variant)
    with pytest.raises(ModelLoadError, match=message):
        load_gguf(path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("Llama"), gguf_variant(arch="minicpm"))
    with pytest.raises(
        ModelLoadError, match=r"minicpm.*llama, mistral3, llama4, qwen2, qwen2moe, qwen3, qwen3moe"
    ):
        load_gguf(path)


def test_end_of_turn_and_advised_sampling_go_into_the_generation_config(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    advised = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "tokenizer.ggml.eot_token_id": 7}
    variant = gguf_variant(arch="llama", metadata=advised)
    path = write_gguf(tmp_path / "model.gguf", random_model("Llama"), variant)
    assert generation_config(read_header(path)) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "temperature": 0.5,
        "top_k": 20,
    }


def test_progress_of_loading_ends_at_one(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model("Llama"), gguf_variant(arch="llama", permute=True))
    seen: list[float | None] = []
    listener: Callable[[Any], None] = lambda message: seen.append(message.fraction)
    config = decoder_config(hf_config(read_header(path)))
    load_decoder(
        config,
        (path,),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=None,
        report=Reporter(listener, "load"),
    )
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
