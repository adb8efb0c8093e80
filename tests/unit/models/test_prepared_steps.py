"""A prepared step gives the bits of the eager path, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from nbengine.distributed.communicator import SINGLE
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.weights import PackedWeight
from nbengine.models.prepared.steps import PreparedSteps
from tests.support.parallel_support import ThreadWorld
from tests.support.thorough import in_turn
from tests.unit.models.prepared_batches import (
    EXPERTS,
    Batches,
    Load,
    assert_same_bits,
    assert_same_bits_of_all_steps,
    expert_metadata,
    load_gguf,
)


@pytest.fixture
def load(tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any) -> Load:
    def load(
        kind: str = "Llama",
        weight_type: Kind = Kind.Q4_1,
        dtype: torch.dtype = torch.bfloat16,
        dense: str = "no matrix",
        **settings: Any,
    ) -> DecoderForCausalLM:
        arch = kind.lower()
        metadata = expert_metadata(arch) if kind.endswith("Moe") else {}
        variant = gguf_variant(arch=arch, weight_type=weight_type, metadata=metadata, dense=dense)
        path = write_gguf(tmp_path / "model.gguf", random_model(kind, **settings), variant)
        return load_gguf(path, dtype=dtype)

    return load


SHARED = {"hidden_size": 128, "shared_expert_intermediate_size": 96}
MODELS: dict[str, tuple[str, Kind, dict[str, Any]]] = {
    "llama": ("Llama", Kind.Q4_1, {"head_dim": 32}),
    "biases": ("Qwen2", Kind.Q8_0, {"hidden_size": 128}),
    "norms of heads": ("Qwen3", Kind.Q4_0, {"head_dim": 32}),
    "tied": (
        "Llama",
        Kind.Q5_0,
        {"head_dim": 32, "tie_word_embeddings": True, "hidden_size": 128, "num_key_value_heads": 4},
    ),
    "biases of feed-forward blocks": ("Llama", Kind.Q5_1, {"head_dim": 32, "mlp_bias": True}),
    "16 bits": ("Qwen3", Kind.BF16, {"head_dim": 32, "hidden_size": 128}),
    "16 bits, biases and a tied vocabulary": (
        "Qwen2",
        Kind.F16,
        {"hidden_size": 128, "vocab_size": 99, "intermediate_size": 80, "tie_word_embeddings": True},
    ),
    "values of 16 bits": ("Llama", Kind.Q8_0, {"head_dim": 32, "mlp_bias": True, "dense": "v_proj"}),
    "outputs of blocks of 16 bits": ("Llama", Kind.Q4_1, {"head_dim": 32, "dense": "o_proj"}),
    "outputs of gates of 16 bits": ("Llama", Kind.Q4_0, {"head_dim": 32, "dense": "down_proj"}),
    "gates of 16 bits": ("Llama", Kind.Q4_0, {"head_dim": 32, "dense": "gate_proj"}),
    "experts": ("Qwen3Moe", Kind.Q4_1, {**EXPERTS, "dense": "mlp.gate."}),
    "experts and a quantised router": ("Qwen3Moe", Kind.Q8_0, {**EXPERTS, "norm_topk_prob": False}),
    "experts beside a block of 16 bits for all": (
        "Qwen2Moe",
        Kind.Q4_1,
        {**EXPERTS, **SHARED, "dense": "shared_expert"},
    ),
    "experts beside a block for all": ("Qwen2Moe", Kind.Q4_1, {**EXPERTS, **SHARED, "dense": "gate."}),
}


@pytest.mark.parametrize(("name", "num_threads", "kv_dtype"), in_turn(MODELS, [1, 2, 3], [None, torch.int8]))
def test_a_prepared_step_has_the_bits_of_the_eager_path(
    name: str,
    num_threads: int,
    kv_dtype: torch.dtype | None,
    load: Load,
    threads: Callable[[int], None],
) -> None:
    threads(num_threads)
    kind, weight_type, settings = MODELS[name]
    model = load(kind, weight_type, **settings)
    assert model._prepared is not None
    batches = Batches(model, kv_dtype)
    assert_same_bits_of_all_steps(batches)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["auto", "int8"])
def test_layers_may_differ_in_what_their_queries_see(
    load: Load, threads: Callable[[int], None], kv_dtype: torch.dtype | None, num_threads: int
) -> None:
    threads(num_threads)
    model = load(head_dim=32, num_hidden_layers=5)
    scale, sinks = 0.2, torch.linspace(-2, 3, 4)
    options = [
        AttentionOptions(scale, window=20, sinks=sinks),
        AttentionOptions(scale),
        AttentionOptions(scale / 2, window=20, soft_cap=2.0),
        AttentionOptions(scale, chunk=48),
        AttentionOptions(scale, soft_cap=3.0),
    ]
    batches = Batches(model, kv_dtype)
    plain, _ = batches.step([200], seed=3, prepared=True)
    plain_hidden = plain.hidden.clone()
    model.forget_addresses()
    for layer, each in zip(model.layers, options, strict=True):
        layer.self_attn.attention.options = each
    assert PreparedSteps.covers(model)
    assert_same_bits_of_all_steps(batches)
    assert not torch.equal(batches.step([200], seed=3, prepared=True)[0].hidden, plain_hidden)


def test_sinks_that_are_not_read_in_place_are_not_covered(load: Load) -> None:
    model = load(head_dim=32)
    attention = model.layers[1].self_attn.attention
    for sinks, covered in ((torch.zeros(4), True), (torch.zeros(4).bfloat16(), False)):
        attention.options = AttentionOptions(1.0, sinks=sinks)
        assert PreparedSteps.covers(model) is covered


def test_the_norms_of_heads_do_something(load: Load, threads: Callable[[int], None]) -> None:
    threads(1)
    batches = Batches(load("Qwen3", head_dim=32))
    before = batches.step([8, 9], seed=1, prepared=True)[0].hidden.clone()
    with torch.inference_mode():
        for layer in batches.model.layers:
            assert layer.self_attn.k_norm is not None
            layer.self_attn.k_norm.weight.mul_(3)
    assert not torch.equal(before, batches.step([8, 9], seed=1, prepared=True)[0].hidden)


def test_layers_are_told_one_by_one_where_they_take_long(load: Load, threads: Callable[[int], None]) -> None:
    threads(1)
    batches = Batches(load(head_dim=32))
    told: list[int] = []
    batches.model.on_layers = told.append
    batches.step([8, 9], seed=1, prepared=True)
    assert told == [3]
    batches.step([8, 9], [1, 9], seed=1, prepared=True)
    assert told[1:] == [1, 1, 1]


def test_weights_that_lie_elsewhere_are_found_again(load: Load, threads: Callable[[int], None]) -> None:
    threads(1)
    batches = Batches(load(head_dim=32))
    model = batches.model
    output, _ = batches.step([8, 9], seed=1, prepared=True)
    before = output.hidden.clone()
    model.forget_addresses()
    with torch.inference_mode():
        for each in [layer.self_attn.o_proj for layer in model.layers]:
            assert isinstance(each.weight, PackedWeight)
            elsewhere = each.weight.tensor.clone()
            each.weight.tensor.fill_(0)
            each.weight = replace(each.weight, tensor=elsewhere)
    after, _ = batches.step([8, 9], seed=1, prepared=True)
    assert torch.equal(before, after.hidden)


def test_embeddings_that_are_given_take_the_eager_path_where_the_step_looks_them_up(
    load: Load, threads: Callable[[int], None]
) -> None:
    threads(1)
    batches = Batches(load(head_dim=32))
    output, _ = batches.step([8, 9], seed=1, prepared=True, given=True)
    assert output.logits is None
    expected, _ = batches.step([8, 9], seed=1, prepared=False)
    assert torch.equal(output.hidden, expected.hidden)


def test_logits_that_are_not_finite_have_no_largest(load: Load, threads: Callable[[int], None]) -> None:
    threads(1)
    batches = Batches(load(head_dim=32))
    assert batches.model.norm is not None
    with torch.inference_mode():
        batches.model.norm.weight[3] = torch.nan
    output, _ = batches.step([8, 9], seed=1, prepared=True)
    assert output.logits is not None
    assert output.logits.isnan().all()
    assert output.largest is None


def test_heads_that_are_no_whole_vectors_are_not_covered(load: Load) -> None:
    assert PreparedSteps.covers(load(head_dim=32))
    assert not PreparedSteps.covers(load())


def test_experts_that_several_engine_cores_divide_take_the_eager_path_until_one_has_them_again(
    load: Load, threads: Callable[[int], None]
) -> None:
    threads(1)
    kind, weight_type, settings = MODELS["experts"]
    model, untouched = (load(kind, weight_type, **settings) for _ in range(2))
    batches = Batches(model)
    before = batches.step([8, 9], seed=1, prepared=True)[0].hidden.clone()
    (two, _) = ThreadWorld(dp_size=2).states
    for block in model.moe_blocks:
        block.redivide(two)
    model.redivided(two.layout)
    assert model._prepared is None
    for block, other in zip(model.moe_blocks, untouched.moe_blocks, strict=True):
        slots = dict(other.experts.slots(""))
        for name, slot in block.redivide(SINGLE).items():
            slot.tensor.copy_(slots[name].tensor)
    model.redivided(SINGLE.layout)
    assert_same_bits(batches, [8, 9], seed=1)
    assert torch.equal(before, batches.step([8, 9], seed=1, prepared=True)[0].hidden)
