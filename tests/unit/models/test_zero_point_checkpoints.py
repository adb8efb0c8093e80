"""AWQ and GPTQ checkpoints hold what their formats say, packed or dense, on one rank or on several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from nbengine.config import ModelConfig, ParallelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.layout import layouts
from nbengine.errors import ModelLoadError
from nbengine.kernels.quantized import dense
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.checkpoints.safetensors_loader import SafetensorsWeights
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.configs.quantization_config import ZeroPoints, stored_quantization
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.weights import WeightSlot
from nbengine.models.loading import load_model, packed_formats, resolve_dtype
from tests.support.thorough import amount, combinations, in_turn
from tests.unit.models.quantized_checkpoints import (
    DENSE_VARIANTS,
    VARIANTS,
    Variant,
    is_quantized,
    random_matrix,
    write_checkpoint,
)

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(4)).tolist()
ALL = {**VARIANTS, **DENSE_VARIANTS}


def read(directory: Path, parallel: ParallelState = SINGLE, **settings: Any) -> DecoderForCausalLM:
    config = resolve_model(ModelConfig(model=str(directory), tokenizer="none", **settings))
    return load_model(config, CPU, torch.float32, parallel=parallel)


def part(slot: WeightSlot, values: Tensor) -> Tensor:
    return values[slot.index]


def values_of(slot: WeightSlot) -> Tensor:
    return slot.tensor if slot.form is None else dense(slot.form, slot.tensor, slot.rows)


@pytest.mark.parametrize(
    ("name", "tp_size"),
    amount(
        [
            *((name, (4, 2)[number % 2]) for number, name in enumerate(ALL)),
            *((name, 1) for name in ("awq 32", "gptq 4", "act-order")),
        ],
        thorough=[(name, tp_size) for name in ALL for tp_size in (1, 2, 4)],
    ),
)
def test_every_rank_holds_the_values_of_its_part(
    name: str, tp_size: int, tmp_path: Path, random_model: Any
) -> None:
    model = random_model("Llama", hidden_size=128, intermediate_size=256)
    checkpoint = write_checkpoint(tmp_path, model, ALL[name])
    for layout in layouts(ParallelConfig(tensor_parallel_size=tp_size)):
        slots = read(tmp_path, ParallelState(layout)).weight_slots()
        for weight, slot in slots.items():
            assert torch.equal(values_of(slot), part(slot, checkpoint[weight])), weight
            # A quarter of the columns is a whole number of spans.
            stays = name in VARIANTS and is_quantized(weight)
            assert (slot.form is not None) == stays, weight


FUSED = {
    "Phi3": {"pad_token_id": 0},
    "Glm": {"pad_token_id": 0, "head_dim": 32},
    "Glm4": {"pad_token_id": 0, "head_dim": 32, "attention_bias": True},
}
"""Families whose files have several projections in one, and their settings."""
ROWS = {
    "self_attn.qkv_proj": {"q_proj": 128, "k_proj": 64, "v_proj": 64},
    "mlp.gate_up_proj": {"gate_proj": 256, "up_proj": 256},
}


@pytest.mark.parametrize(("name", "kind", "tp_size"), combinations(ALL, ["Phi3", "Glm4"], [1, 2], together=1))
def test_projections_in_one_matrix_are_taken_apart(
    name: str, kind: str, tp_size: int, tmp_path: Path, random_model: Any
) -> None:
    model = random_model(kind, hidden_size=128, intermediate_size=256, **FUSED[kind])
    values = write_checkpoint(tmp_path, model, ALL[name])
    expected = dict(values)
    for block, projections in ROWS.items():
        for weight, value in values.items():
            if block in weight and value.shape[0] == sum(projections.values()):
                parts = expected.pop(weight).split(list(projections.values()))
                last = block.split(".")[1]
                expected |= {weight.replace(last, p): v for p, v in zip(projections, parts, strict=True)}
    for layout in layouts(ParallelConfig(tensor_parallel_size=tp_size)):
        slots = read(tmp_path, ParallelState(layout)).weight_slots()
        for weight, slot in slots.items():
            assert torch.equal(values_of(slot), part(slot, expected[weight])), weight
            assert (slot.form is not None) == (name in VARIANTS and is_quantized(weight)), weight


FAMILIES: dict[str, dict[str, Any]] = {"Llama": {}, "Qwen2": {}, "Qwen3": {"head_dim": 32}, **FUSED}


@pytest.mark.parametrize(
    ("kind", "name"), combinations(FAMILIES, ["awq 64", "gptq 8", "gptq 4", "act-order"], together=1)
)
def test_logits_are_those_of_transformers(
    kind: str, name: str, tmp_path: Path, random_model: Any, make_runner: Any
) -> None:
    model = random_model(kind, hidden_size=128, intermediate_size=256, **FAMILIES[kind])
    write_checkpoint(tmp_path, model, ALL[name])
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    exact = make_runner(read(tmp_path, dtype="float32")).step({"a": TOKENS})["a"]
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-4)
    assert exact.argmax(-1).tolist() == expected.argmax(-1).tolist()
    found = make_runner(read(tmp_path)).step({"a": TOKENS})["a"]
    # Activations are rounded to 8 bits.
    error = found - expected
    assert float(error.std()) < 0.05 * float(expected.std())
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 6 * error.std()
    assert is_clear.sum() > 5
    assert torch.equal(found.argmax(-1)[is_clear], expected.argmax(-1)[is_clear])


def test_float32_and_other_devices_have_dense_weights(tmp_path: Path, random_model: Any) -> None:
    write_checkpoint(tmp_path, random_model("Llama"), VARIANTS["awq 32"])
    assert all(slot.form is None for slot in read(tmp_path, dtype="float32").weight_slots().values())
    config = resolve_model(ModelConfig(model=str(tmp_path), tokenizer="none"))
    assert packed_formats(config, torch.device("cuda")).formats == {}


@pytest.mark.parametrize("name", ["awq 32", "gptq 4"])
def test_what_is_not_quantised_has_the_16_bits_of_the_checkpoint(
    name: str, tmp_path: Path, random_model: Any
) -> None:
    write_checkpoint(tmp_path, random_model("Llama", head_dim=32, hidden_size=128), ALL[name])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float16"}))
    config = resolve_model(ModelConfig(model=str(tmp_path), tokenizer="none"))
    dtype = resolve_dtype(config, load_hf_config(config), CPU)
    assert dtype is torch.float16
    model = load_model(config, CPU, dtype)
    assert isinstance(model, DecoderForCausalLM)
    assert model.lm_head is not None
    assert model.lm_head.rows.weight.tensor.dtype is torch.float16
    assert model._prepared is not None
    assert model._prepared.goes_on


def test_the_tensors_of_a_matrix_may_lie_in_several_files(tmp_path: Path, random_model: Any) -> None:
    checkpoint = write_checkpoint(tmp_path, random_model("Llama"), VARIANTS["awq 32"], shards=3)
    for name, slot in read(tmp_path).weight_slots().items():
        assert torch.equal(values_of(slot), checkpoint[name]), name


@settings(max_examples=amount(15, thorough=1200), deadline=None)
@given(
    name=st.sampled_from(sorted(ALL)),
    row_words=st.integers(1, 9),
    groups=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_any_part_of_a_matrix_is_that_of_its_values(
    name: str, row_words: int, groups: int, seed: int, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    variant = ALL[name]
    rows, columns = 8 * row_words, groups * (variant.group if variant.group > 0 else 40)
    tensors, values = random_matrix(variant, rows, columns, seed)
    path = tmp_path_factory.mktemp("matrix") / "model.safetensors"
    save_file({f"m.{end}": tensor.contiguous() for end, tensor in tensors.items()}, path)
    weights = SafetensorsWeights((path,), stored_quantization({"quantization_config": variant.entry}))
    assert weights.shapes == {"m.weight": (rows, columns)}
    dim = data.draw(st.sampled_from([0, 1]))
    start = data.draw(st.integers(0, (rows, columns)[dim] - 1))
    stop = data.draw(st.integers(start + 1, (rows, columns)[dim]))
    shape = (stop - start, columns) if dim == 0 else (rows, stop - start)
    slot = WeightSlot(torch.empty(shape), (rows, columns), dim, start)
    seen: list[int] = []
    weights.load({"m.weight": slot}, seen.append)
    assert sum(seen) == weights.num_bytes({"m.weight": slot})
    expected = torch.from_numpy(values).float()[slot.index]
    assert torch.equal(slot.tensor, expected)


def test_a_zero_point_of_0_in_gptqs_first_format_borrows_from_the_next(tmp_path: Path) -> None:
    # Zero points 0, 3, 7, 8, ... less 0x11111111 as one number.
    zeros = [0, 3, 7, 8, 15, 0, 0, 1]
    word = (sum(zero << 4 * place for place, zero in enumerate(zeros)) - 0x11111111) % 2**32
    tensors = {
        "m.qweight": torch.zeros(4, 8, dtype=torch.int32),
        "m.qzeros": torch.from_numpy(np.array([[word]], np.uint32).view(np.int32)),
        "m.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = SafetensorsWeights((tmp_path / "model.safetensors",), ZeroPoints("gptq", 4, 32, zero_offset=1))
    slot = WeightSlot(torch.empty(8, 32), (8, 32), 0)
    weights.load({"m.weight": slot}, lambda num_bytes: None)
    assert slot.tensor[:, 0].tolist() == [-float(zero) for zero in zeros]


UP = "model.layers.1.mlp.up_proj"


def poisoned(value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.scales"][1, 5] = value

    return change


def replaced(part: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{UP}.{part}": tensor})


def without(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{UP}.{part}"]

    return change


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "NaN": (poisoned(float("nan")), rf"corrupt: tensor {UP}.scales has a scale that is not finite"),
    "infinity": (poisoned(float("inf")), rf"corrupt: tensor {UP}.scales has a scale that is not finite"),
    "no zeros": (without("qzeros"), rf"tensor {UP}.qzeros is missing"),
    "no scales": (without("scales"), rf"tensor {UP}.scales is missing"),
    "no levels": (without("qweight"), rf"tensor {UP}.qweight is missing"),
    "size of scales": (
        replaced("scales", torch.ones(1, 128).half()),
        rf"tensor {UP}.scales has the shape \[1, 128\].* asks for \[2, 128\]",
    ),
    "size of zeros": (
        replaced("qzeros", torch.ones(2, 15, dtype=torch.int32)),
        rf"tensor {UP}.qzeros has the shape \[2, 15\].* asks for \[2, 16\]",
    ),
    "type of levels": (
        replaced("qweight", torch.ones(8, 128)),
        rf"tensor {UP}.qweight has the type F32 and the shape \[8, 128\], not two dimensions of I32",
    ),
    "dimensions": (
        replaced("qweight", torch.ones(8, dtype=torch.int32)),
        rf"tensor {UP}.qweight has the type I32 and the shape \[8\], not two",
    ),
    "size of levels": (
        replaced("qweight", torch.ones(8, 120, dtype=torch.int32)),
        rf"tensor {UP}.scales has the shape \[2, 128\].* asks for \[2, 120\]",
    ),
    "groups": (
        replaced("g_idx", torch.arange(64, dtype=torch.int32)),
        rf"corrupt: tensor {UP}.g_idx names groups that are not from 0 to 1",
    ),
    "size of groups": (
        replaced("g_idx", torch.zeros(63, dtype=torch.int32)),
        rf"tensor {UP}.g_idx has the type I32 and the shape \[63\], not \[64\]",
    ),
    "both": (
        lambda tensors: tensors.update({f"{UP}.weight": torch.ones(128, 64)}),
        rf"{UP}.weight.*{UP}.qweight.*are the same weight",
    ),
}


@pytest.mark.parametrize(("fault", "dtype"), in_turn(FAULTS, ["auto", "float32"]))
def test_a_corrupt_matrix_is_named(fault: str, dtype: str, tmp_path: Path, random_model: Any) -> None:
    change, message = FAULTS[fault]
    write_checkpoint(tmp_path, random_model("Llama"), Variant("gptq"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=message) as refusal:
        read(tmp_path, dtype=dtype)
    assert str(path) in str(refusal.value)


def test_act_order_without_its_order_is_refused(tmp_path: Path, random_model: Any) -> None:
    write_checkpoint(tmp_path, random_model("Llama"), Variant("gptq", act_order=True, has_g_idx=False))
    with pytest.raises(ModelLoadError, match=r"g_idx is missing, which desc_act \(act-order\) asks for"):
        read(tmp_path)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
ENTRIES = [
    (
        {"quant_method": "bitsandbytes"},
        "quantization_config.quant_method 'bitsandbytes' is not supported; supported: awq, ",
    ),
    ({}, "quantization_config.quant_method None is not supported"),
    ("awq", "quantization_config must be an object"),
    ({**AWQ, "bits": 3}, "quantization_config.bits 3 is not supported; supported: 4"),
    ({**AWQ, "version": "gemv"}, "quantization_config.version 'gemv' is not supported; supported: gemm"),
    ({**GPTQ, "bits": 2}, "quantization_config.bits 2 is not supported; supported: 4, 8"),
    ({**GPTQ, "bits": True}, "quantization_config.bits True is not supported"),
    ({**GPTQ, "bits": [4]}, r"quantization_config.bits \[4\] is not supported"),
    ({**GPTQ, "group_size": 0}, "group_size must be a positive integer or -1, got 0"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is not supported"),
]


@pytest.mark.parametrize(("entry", "message"), ENTRIES, ids=[message for _, message in ENTRIES])
def test_an_unknown_quantisation_is_refused_with_its_entry(
    entry: Any, message: str, tmp_path: Path, random_model: Any
) -> None:
    write_checkpoint(tmp_path, random_model("Llama"), VARIANTS["awq 32"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": entry}))
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path)


def test_the_entries_of_older_tools_are_read() -> None:
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
    assert stored_quantization({"quantization_config": older}) == ZeroPoints("awq", 4, 64)
    assert stored_quantization({"quantization_config": GPTQ}) == ZeroPoints("gptq", 4, 128, zero_offset=1)
    assert stored_quantization({"quantization_config": None}) is None
