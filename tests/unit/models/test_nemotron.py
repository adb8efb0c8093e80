"""Nemotron-H: each layer of a file is one block, of which the model's layers have two or one."""

from __future__ import annotations

from typing import Any

import pytest

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.configs.moe_config import GroupedRouting
from nbengine.models.registry import decoder_config, has_experts, load_family
from tests.support.recurrent_cases import NEMOTRON, NEMOTRON_EXPERTS
from tests.unit.models.conftest import SIZES

HF: dict[str, Any] = {**SIZES, **NEMOTRON, "architectures": ["NemotronHForCausalLM"]}
WITH_EXPERTS = {**HF, **NEMOTRON_EXPERTS}
FAMILY = load_family("nbengine.models.families.nemotron:NemotronH")


def test_a_feed_forward_block_is_part_of_the_layer_of_the_block_before_it() -> None:
    found = decoder_config(HF)
    assert [layer.attention for layer in found.layers] == ["recurrent", "recurrent", "full", "recurrent"]
    assert [layer.has_mlp for layer in found.layers] == [True, False, True, False]
    assert (found.num_layers, found.file_layers) == (4, 6)
    assert all(layer.rope is None for layer in found.layers)
    assert (found.moe, found.gated, found.mamba2 is None) == (None, False, False)
    pattern = {key: value for key, value in HF.items() if key != "layers_block_type"}
    assert decoder_config({**pattern, "hybrid_override_pattern": "M-M*-M"}) == found
    old = ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"]
    assert decoder_config({**pattern, "layers_block_type": old}) == found


def test_experts_have_no_gate_and_are_in_some_layers() -> None:
    moe = decoder_config(WITH_EXPERTS).moe
    assert moe is not None
    assert moe.projections == (("up_proj", 0), ("down_proj", 1))
    assert moe.routing == GroupedRouting("sigmoid", has_correction=True, scale=2.5)
    assert [moe.has_experts(layer) for layer in range(4)] == [True, True, True, False]
    assert (has_experts(WITH_EXPERTS), has_experts(HF)) == (True, False)
    # What is wrong is told when the whole configuration is read.
    assert not has_experts({**WITH_EXPERTS, "layers_block_type": 7})
    without_dense = {**WITH_EXPERTS, "layers_block_type": WITH_EXPERTS["layers_block_type"][:-1]}
    assert decoder_config(without_dense).intermediate_size == 0


def test_tensors_of_blocks_are_those_of_layers() -> None:
    config = decoder_config(WITH_EXPERTS)

    def ours(name: str, shape: tuple[int, ...] = (64,)) -> dict[str, TensorPart]:
        return dict(FAMILY.tensor_parts(config, name, shape))

    layers = "model.layers."
    assert list(ours("backbone.layers.0.norm.weight")) == [f"{layers}0.input_layernorm.weight"]
    assert list(ours("model.layers.1.norm.weight")) == [f"{layers}0.post_attention_layernorm.weight"]
    assert list(ours("backbone.layers.2.mixer.norm.weight")) == [f"{layers}1.linear_attn.norm.weight"]
    assert list(ours("backbone.layers.3.mixer.q_proj.weight")) == [f"{layers}2.self_attn.q_proj.weight"]
    assert list(ours("backbone.layers.6.mixer.up_proj.weight")) == [f"{layers}3.mlp.up_proj.weight"]
    correction = f"{layers}0.mlp.gate.e_score_correction_bias"
    assert list(ours("backbone.layers.1.mixer.gate.e_score_correction_bias")) == [correction]
    assert list(ours("backbone.layers.1.mixer.gate.e_score_correction.bias")) == [correction]
    shared = f"{layers}0.mlp.shared_expert.up_proj.weight"
    assert list(ours("backbone.layers.1.mixer.shared_experts.up_proj.weight")) == [shared]
    stack = "model.layers.1.mixer.experts.up_proj"
    found = ours(stack, (6, 32, 64))
    assert list(found) == [f"{layers}0.mlp.experts.{expert}.up_proj.weight" for expert in range(6)]
    assert found[f"{layers}0.mlp.experts.4.up_proj.weight"] == TensorPart(stack, (32, 64), 4)
    assert list(ours("backbone.embeddings.weight")) == ["model.embed_tokens.weight"]
    assert list(ours("model.norm_f.weight")) == ["model.norm.weight"]
    assert ours("mtp.layers.0.norm.weight") == {}
    with pytest.raises(
        ModelLoadError, match=r"tensor backbone\.layers\.7\.\S+: the configuration has 7 layers"
    ):
        ours("backbone.layers.7.norm.weight")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers_block_type": ["mamba", "other"]}, "layers_block_type must be a list of .* got"),
        ({"layers_block_type": 7}, "layers_block_type must be a list of .* got 7"),
        ({"layers_block_type": "M-?"}, "a text of M, .* got 'M-"),
        ({"layers_block_type": ["mlp", "mamba"]}, "a feed-forward block that follows neither"),
        ({"layers_block_type": ["mamba", "mlp", "moe"]}, "a feed-forward block that follows neither"),
        ({"moe_latent_size": 32}, "moe_latent_size, experts of latents, is not supported"),
        ({"mlp_bias": True}, "mlp_bias with experts is not supported"),
        ({"mlp_hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: relu2"),
        ({"mamba_num_heads": 9}, r"mamba_n_heads \(9\) must be a multiple of mamba_n_groups \(2\)"),
    ],
)
def test_what_is_wrong_or_not_supported_is_told_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        decoder_config({**WITH_EXPERTS, **settings})
