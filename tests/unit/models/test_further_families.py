"""Ministral, OLMoE, EXAONE 4 and GLM-4.5: what their configurations say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from family_cases import FULL, GLM_4_MOE, GROWING, SLIDING

from nbengine.errors import ModelLoadError
from nbengine.models.configs.decoder_config import LayerConfig, QueryGrowth
from nbengine.models.registry import decoder_config, has_experts
from tests.unit.models.conftest import SIZES

WINDOW, TURNS_NOTHING = LayerConfig("window", 8), LayerConfig(rope=None)


def config_of(kind: str, **settings: Any) -> Any:
    return decoder_config({**SIZES, "architectures": [f"{kind}ForCausalLM"], **settings})


def test_queries_grow_where_the_rotary_embedding_says_so() -> None:
    growth = QueryGrowth(8, 0.6, ahead=0, of_turned=True)
    assert config_of("Ministral3", rope_parameters=GROWING).query_growth == growth
    assert config_of("Mistral", rope_parameters=GROWING).query_growth == growth
    plain = {key: value for key, value in GROWING.items() if key != "llama_4_scaling_beta"}
    assert config_of("Ministral3", rope_parameters=plain).query_growth is None


def test_ministral_3_has_a_rotary_embedding_of_its_own_where_nothing_is_said() -> None:
    found = config_of("Ministral3", max_position_embeddings=None, head_dim=None)
    assert (found.head_dim, found.max_position_embeddings) == (128, 262_144)
    assert found.rope_theta == 1e6
    assert found.rope_scaling is not None
    assert (found.rope_scaling.kind, found.rope_scaling.factor) == ("yarn", 16.0)
    assert found.query_growth == QueryGrowth(16_384, 0.1, ahead=0, of_turned=True)


def test_null_says_that_there_is_no_window_and_nothing_that_there_is_the_usual_one() -> None:
    for kind in ("Mistral", "Ministral"):
        assert config_of(kind, sliding_window=None).layers == ()
        assert config_of(kind, max_position_embeddings=8192).layer(0) == LayerConfig("window", 4096)
    assert config_of("Ministral3", max_position_embeddings=8192).layers == ()
    assert config_of("Exaone4", sliding_window=None).layers == ()
    assert config_of("Exaone4", max_position_embeddings=8192).layer(0) == LayerConfig("window", 4096)


@pytest.mark.parametrize("kind", ["Mistral", "Ministral3", "Phi3", "Mixtral", "Qwen3Moe"])
def test_a_window_is_that_of_all_layers_whatever_their_types_where_the_class_says_so(kind: str) -> None:
    types: dict[str, Any] = {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 8, "head_dim": 16}
    assert config_of(kind, use_sliding_window=True, **types).layers == (WINDOW,) * 3
    assert config_of("Ministral", **types).layers == (LayerConfig(), WINDOW, LayerConfig())


def test_types_of_layers_say_which_have_windows_in_smollm_3_whatever_else_is_said() -> None:
    types: dict[str, Any] = {"sliding_window": 8, "use_sliding_window": False, "no_rope_layers": [1, 1, 1]}
    assert {layer.size for layer in config_of("SmolLM3", **types).layers} == {0}
    stated = config_of("SmolLM3", layer_types=[FULL, SLIDING, FULL], **types)
    assert [layer.size for layer in stated.layers] == [0, 8, 0]


def test_every_second_layer_of_qwen_2_moe_has_the_window_before_the_last_ones() -> None:
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 6}
    found = config_of("Qwen2Moe", **windows, max_window_layers=4)
    assert [layer.size for layer in found.layers] == [8, 0, 8, 0, 0, 0]
    assert config_of("Qwen2Moe", **{**windows, "use_sliding_window": False}).layers == ()


@pytest.mark.parametrize(("stated", "expected"), [("gelu", "gelu_pytorch_tanh"), ("relu", "relu")])
def test_gemma_1_has_its_activation_under_another_name_than_gemma_2(stated: str, expected: str) -> None:
    assert config_of("Gemma", hidden_act=stated).hidden_act == expected
    assert config_of("Gemma2", hidden_act=stated).hidden_act == "gelu_pytorch_tanh"
    assert config_of("Gemma2", hidden_activation=stated).hidden_act == stated


def test_gemma_3_caps_no_scores() -> None:
    assert config_of("Gemma2", attn_logit_softcapping=5.0).attention_soft_cap == 5.0
    assert config_of("Gemma3", attn_logit_softcapping=5.0).attention_soft_cap is None


def test_the_original_context_beside_a_longrope_counts_before_that_within() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_parameters": {"rope_type": "longrope", **factors}}
    for stated, expected in (({"original_max_position_embeddings": 32}, 32), ({}, 4096)):
        scaling = config_of("Phi3", **rope, **stated).rope_scaling
        assert scaling is not None
        assert scaling.original_max_position_embeddings == expected


@pytest.mark.parametrize("kind", ["Mixtral", "Olmoe", "GraniteMoe", "Glm4Moe", "DeepseekV3", "Qwen3Moe"])
def test_experts_have_the_activation_of_the_model(kind: str) -> None:
    for act, expected in (("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu"), ("swish", "silu")):
        assert config_of(kind, hidden_act=act, num_experts_per_tok=2).moe.hidden_act == expected


def test_layers_of_exaone_4_that_see_everything_turn_nothing_if_others_have_windows() -> None:
    settings: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 8}
    pattern = (WINDOW, WINDOW, WINDOW, TURNS_NOTHING)
    assert config_of("Exaone4", **settings).layers == pattern
    assert config_of("Exaone4", **settings, sliding_window_pattern="LLLG").layers == pattern
    stated = config_of("Exaone4", **settings, layer_types=[SLIDING, FULL] * 2)
    assert stated.layers == (WINDOW, TURNS_NOTHING) * 2
    # A window of all tokens hides nothing, and its layers turn nevertheless.
    hidden = config_of("Exaone4", num_hidden_layers=4, sliding_window=256)
    assert hidden.layers == (LayerConfig(),) * 3 + (TURNS_NOTHING,)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("Exaone4", {"sliding_window_pattern": "LGL"}, "sliding_window_pattern must be a positive integer"),
        ("Exaone4", {"sliding_window_pattern": 0}, "sliding_window_pattern must be .* got 0"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv must be null for OLMoE, got 8.0"),
        ("Ministral3", {"rope_parameters": {**GROWING, "llama_4_scaling_beta": "x"}}, "llama_4_scaling_beta"),
    ],
)
def test_what_is_wrong_is_told_by_name(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config_of(kind, sliding_window=8, **settings)


def test_experts_of_glm_4_5_are_chosen_as_those_of_deepseek_3() -> None:
    found = config_of("Glm4Moe", **GLM_4_MOE)
    assert has_experts({"architectures": ["Glm4MoeForCausalLM"]})
    assert found.moe.routing is not None
    assert (found.moe.routing.score, found.moe.routing.has_correction) == ("sigmoid", True)
    assert (found.moe.dense_layers, found.moe.renormalize, found.latent) == ((0,), True, None)
    assert found.rotary_dim == 8
