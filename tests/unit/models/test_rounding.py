"""Weights that are rounded when they are loaded: how well, and always to the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from nbengine.config import ModelConfig, ParallelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.layout import layouts
from nbengine.errors import InvalidArgumentError, ModelLoadError
from nbengine.kernels.quantized import dense, values
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.checkpoints.rounding import rounded, rounded_format
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.weights import WeightSlot
from nbengine.models.loading import load_model, packed_formats
from tests.support.thorough import amount
from tests.unit.models.quantized_checkpoints import VARIANTS, write_checkpoint

CPU = torch.device("cpu")
BITS = {"int8": 8, "int4": 4}
TOKENS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(4)).tolist()


def random_weight(rows: int, blocks: int, seed: int) -> Tensor:
    """Blocks of very different sizes, some without a spread, some with an outlier."""
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, blocks, 32, generator=chance)
    weight *= 10 ** (4 * torch.rand(rows, blocks, 1, generator=chance) - 3)
    kinds = torch.randint(0, 6, (rows, blocks), generator=chance)
    weight[kinds == 0] = 0.0
    weight[kinds == 1] = weight[kinds == 1][:, :1]
    weight[kinds == 2] += 5.0
    weight[..., 0] *= torch.where(kinds == 3, 10.0, 1.0)
    return weight.view(rows, -1)


def errors(found: Tensor, weight: Tensor) -> Tensor:
    return (found.double() - weight.double()).square().view(-1, 32).sum(1)


@settings(max_examples=amount(15, thorough=1200), deadline=None)
@given(rows=st.integers(1, 20), blocks=st.integers(1, 6), seed=st.integers(0, 10**9))
def test_no_block_is_rounded_worse_than_by_its_smallest_and_largest_value(
    rows: int, blocks: int, seed: int
) -> None:
    weight = random_weight(rows, blocks, seed)
    found = values(rounded_format(4), rounded(4, weight))
    reference = gguf.dequantize(gguf.quantize(weight.numpy(), Kind.Q4_1), Kind.Q4_1)
    plain = errors(torch.from_numpy(reference), weight)
    # The reference chooses levels before it rounds the scale, so that ours may be worse by the rounding of sums.
    slack = 1e-6 * weight.double().square().view(-1, 32).sum(1)
    assert (errors(found, weight) <= plain + slack).all()


@settings(max_examples=amount(15, thorough=1200), deadline=None)
@given(rows=st.integers(1, 20), blocks=st.integers(1, 6), seed=st.integers(0, 10**9))
def test_eight_bits_are_off_by_half_a_step_at_most(rows: int, blocks: int, seed: int) -> None:
    weight = random_weight(rows, blocks, seed)
    parts = rounded(8, weight)
    error = (values(rounded_format(8), parts) - weight).abs().view(rows, blocks, 32).amax(-1)
    largest = weight.abs().view(rows, blocks, 32).amax(-1)
    # The scale itself is rounded to float16, of which the smallest step is 2**-24.
    assert (error <= 0.5 * parts.scales.float() + largest * 2**-11 + 127 * 2**-25).all()


def test_the_search_makes_the_error_of_four_bits_smaller() -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    found = errors(values(rounded_format(4), rounded(4, weight)), weight).sum()
    plain = gguf.dequantize(gguf.quantize(weight.numpy(), Kind.Q4_1), Kind.Q4_1)
    assert found < 0.88 * errors(torch.from_numpy(plain), weight).sum()


@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=amount(15, thorough=1200), deadline=None)
@given(data=st.data(), rows=st.integers(1, 40), blocks=st.integers(1, 9), seed=st.integers(0, 10**9))
def test_a_part_is_rounded_to_the_bits_of_the_whole(
    bits: int, data: Any, rows: int, blocks: int, seed: int
) -> None:
    weight = random_weight(rows, blocks, seed).bfloat16()
    first, last = sorted(data.draw(st.tuples(st.integers(0, rows - 1), st.integers(1, rows))))
    left, right = sorted(data.draw(st.tuples(st.integers(0, blocks - 1), st.integers(1, blocks))))
    last, right = max(last, first + 1), max(right, left + 1)
    whole, part = (
        values(rounded_format(bits), rounded(bits, each))
        for each in (weight, weight[first:last, 32 * left : 32 * right])
    )
    assert torch.equal(whole[first:last, 32 * left : 32 * right], part)


def read(directory: Path, parallel: ParallelState = SINGLE, **settings: Any) -> DecoderForCausalLM:
    config = resolve_model(ModelConfig(model=str(directory), tokenizer="none", **settings))
    return load_model(config, CPU, torch.float32, parallel=parallel)


def values_of(slot: WeightSlot) -> Tensor:
    return slot.tensor if slot.form is None else dense(slot.form, slot.tensor, slot.rows)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", BITS)
def test_the_weights_of_several_ranks_are_those_of_one(
    name: str, tp_size: int, tmp_path: Path, random_model: Any
) -> None:
    # A quarter of 192 columns is no whole number of blocks, and the embedding has rows for no whole tiles.
    model = random_model("Llama", hidden_size=192, intermediate_size=320, vocab_size=91)
    model.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    form = rounded_format(BITS[name])
    for layout in layouts(ParallelConfig(tensor_parallel_size=tp_size)):
        slots = read(tmp_path, ParallelState(layout), quantization=name).weight_slots()
        for weight, slot in slots.items():
            expected = checkpoint[weight]
            if expected.dim() == 2:
                expected = values(form, rounded(BITS[name], expected))
                _, columns = expected[slot.index].shape
                assert slot.form is (
                    form if (columns % 32 == 0 and tp_size < 4) or slot.dim == 0 else None
                ), weight
            assert torch.equal(values_of(slot), expected[slot.index]), weight


def test_what_cannot_be_rounded_stays_as_it_is_and_is_logged(
    tmp_path: Path, random_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    random_model("Llama", intermediate_size=72).save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    with caplog.at_level("INFO", "nbengine.models.checkpoints.loader"):
        slots = read(tmp_path, quantization="int8").weight_slots()
    plain = [name for name, slot in slots.items() if slot.form is None and slot.tensor.dim() == 2]
    assert plain == [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)]
    assert all(torch.equal(slots[name].tensor, checkpoint[name]) for name in plain)
    assert f"matrices by type: q8_0 20, float32 3; in float32: {', '.join(plain)}" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "share"), [("int8", 0.05), ("int4", 0.3)])
def test_a_rounded_decoder_computes_nearly_what_it_did(
    name: str, share: float, dtype: torch.dtype, tmp_path: Path, random_model: Any, make_runner: Any
) -> None:
    model = random_model("Qwen2", hidden_size=128).to(dtype)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model.float()(torch.tensor([TOKENS])).logits[0]
    logits = make_runner(read(tmp_path, quantization=name)).step({"a": TOKENS})["a"]
    assert 0 < float((logits - expected).std()) < share * float(expected.std())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_values_that_cannot_be_rounded_are_an_error_that_names_them(
    value: float, tmp_path: Path, random_model: Any
) -> None:
    random_model("Llama").save_pretrained(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    checkpoint = load_file(path)
    checkpoint[name][7, 40] = value
    save_file(checkpoint, path)
    for quantization in BITS:
        with pytest.raises(
            ModelLoadError, match=rf"{path}: tensor {name} has values that are not finite, or"
        ):
            read(tmp_path, quantization=quantization)


def test_rounding_is_refused_where_nothing_computes_with_it(tmp_path: Path, random_model: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"None with dtype='float32'.*leave dtype out.*got 'int8'"):
        ModelConfig(quantization="int8", dtype="float32")
    with pytest.raises(InvalidArgumentError, match=r"None with device='cuda' \(only the CPU.*got 'int4'"):
        ModelConfig(quantization="int4", device="cuda")
    with pytest.raises(InvalidArgumentError, match=r"None, 'int8' or 'int4' \(files of AWQ.*got 'awq'"):
        ModelConfig(quantization="awq")
    random_model("Llama").save_pretrained(tmp_path)
    config = resolve_model(ModelConfig(model=str(tmp_path), tokenizer="none", quantization="int8"))
    with pytest.raises(InvalidArgumentError, match=r"None on cuda \(only the CPU.*device='cpu'.*got 'int8'"):
        packed_formats(config, torch.device("cuda"))


def test_a_processor_without_products_is_named(
    tmp_path: Path, random_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model("Llama").save_pretrained(tmp_path)
    config = resolve_model(ModelConfig(model=str(tmp_path), tokenizer="none", quantization="int8"))
    monkeypatch.setattr("nbengine.models.loading.select_products", lambda device: None)
    with pytest.raises(InvalidArgumentError, match=r"None on cpu \(this machine has no products"):
        packed_formats(config, CPU)
    assert packed_formats(dataclasses.replace(config, quantization=None), CPU).formats == {}


def test_what_is_quantised_already_is_not_rounded(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any, private_cache: Path
) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", random_model("Qwen2", vocab_size=260), gguf_variant("qwen2", vocabulary=260)
    )
    with pytest.raises(InvalidArgumentError, match=r"None for this model \(GGUF files keep their own"):
        read(path, quantization="int4")
    write_checkpoint(tmp_path / "awq", random_model("Llama"), VARIANTS["awq 32"])
    with pytest.raises(
        InvalidArgumentError, match=r"None for this model \(its weights are quantised already, by AWQ"
    ):
        read(tmp_path / "awq", quantization="int4")


def test_encoders_are_not_rounded(tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"None for this model \(encoders"):
        resolve_model(ModelConfig(model=str(tmp_path), tokenizer="none", quantization="int8"))


def test_levels_do_not_depend_on_the_number_of_threads() -> None:
    weight, before, found = random_weight(300, 20, 3), torch.get_num_threads(), []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found.append(values(rounded_format(4), rounded(4, weight)))
    torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)
