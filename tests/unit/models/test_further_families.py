"""Ministral, OLMoE, EXAONE 4 and GLM-4.5: what their configurations say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from family_cases import FULL, GLM_4_MOE, GROWING, LONGROPE, SLIDING, YARN

from nbengine.errors import ModelLoadError
from nbengine.models.configs.decoder_config import LayerConfig, QueryGrowth
from nbengine.models.configs.hf_config import with_text_config
from nbengine.models.registry import decoder_config, has_experts
from tests.unit.models.conftest import SIZES

ORIGINAL = "original_max_position_embeddings"
WINDOW, TURNS_NOTHING = LayerConfig("window", 8), LayerConfig(rope=None)


def config_of(kind: str, **settings: Any) -> Any:
    return decoder_config({**SIZES, "architectures": [f"{kind}ForCausalLM"], **settings})


def test_queries_grow_where_the_rotary_embedding_says_so() -> None:
    growth = QueryGrowth(8, 0.6, ahead=0, of_turned=True)
    assert config_of("Ministral3", rope_parameters=GROWING).query_growth == growth
    assert config_of("Mistral", rope_parameters=GROWING).query_growth == growth
    beside = config_of("Ministral3", rope_parameters=GROWING, **{ORIGINAL: 32})
    assert beside.query_growth == QueryGrowth(32, 0.6, ahead=0, of_turned=True)
    plain = {key: value for key, value in GROWING.items() if key != "llama_4_scaling_beta"}
    assert config_of("Ministral3", rope_parameters=plain).query_growth is None


def test_ministral_3_has_a_rotary_embedding_of_its_own_where_nothing_is_said() -> None:
    found = config_of("Ministral3", max_position_embeddings=None)
    assert (found.head_dim, found.max_position_embeddings) == (128, 262_144)
    assert found.rope_theta == 1e6
    assert found.rope_scaling is not None
    assert (found.rope_scaling.kind, found.rope_scaling.factor) == ("yarn", 16.0)
    assert found.query_growth == QueryGrowth(16_384, 0.1, ahead=0, of_turned=True)
    assert config_of("Ministral3", rope_theta=5.0).ropes[0].theta == 5.0


def test_the_text_beside_images_is_of_the_family_that_it_names() -> None:
    stated = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    for kind, window, eps in (("mistral", 4096, 1e-6), ("ministral3", 0, 1e-5)):
        text = {"model_type": kind, "max_position_embeddings": 8192}
        whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
        found = decoder_config(with_text_config({**stated, **whole, "text_config": text}))
        assert (found.layer(0).size, found.rms_norm_eps) == (window, eps)
        assert (found.query_growth is None) == (kind == "mistral")


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


def test_no_layer_of_qwen_may_be_before_those_with_windows() -> None:
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert config_of("Qwen2", **windows).layers == config_of("Qwen3", **windows).layers == (WINDOW,) * 3
    assert config_of("Qwen2Moe", **windows).layers == ()
    with pytest.raises(ModelLoadError, match="max_window_layers must be an integer from 0 on, got -1"):
        config_of("Qwen2", **{**windows, "max_window_layers": -1})


def test_tied_embeddings_of_lfm2_may_be_denied_under_the_usual_name() -> None:
    stated: dict[str, Any] = {"layer_types": ["conv", FULL, "conv"], "tie_embedding": True}
    assert config_of("Lfm2", **stated, tie_word_embeddings=None).tie_word_embeddings
    assert not config_of("Lfm2", **stated, tie_word_embeddings=False).tie_word_embeddings


@pytest.mark.parametrize(("stated", "expected"), [("gelu", "gelu_pytorch_tanh"), ("relu", "relu")])
def test_gemma_1_has_its_activation_under_another_name_than_gemma_2(stated: str, expected: str) -> None:
    assert config_of("Gemma", hidden_act=stated).hidden_act == expected
    assert config_of("Gemma2", hidden_act=stated).hidden_act == "gelu_pytorch_tanh"
    assert config_of("Gemma2", hidden_activation=stated).hidden_act == stated


def test_gemma_3_caps_no_scores() -> None:
    assert config_of("Gemma2", attn_logit_softcapping=5.0).attention_soft_cap == 5.0
    assert config_of("Gemma3", attn_logit_softcapping=5.0).attention_soft_cap is None


@pytest.mark.parametrize(
    ("kind", "rope", "within", "without"),
    [
        ("Phi3", LONGROPE, 4096, 4096),
        ("Llama", {"rope_type": "yarn", "factor": 4.0}, 64, 256),
        (
            "Llama",
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            64,
            256,
        ),
    ],
)
def test_the_original_context_beside_scaling_counts_before_that_within(
    kind: str, rope: dict[str, Any], within: int, without: int
) -> None:
    inner = {**rope, ORIGINAL: 64}
    for stated, expected in (
        ({"rope_parameters": inner, ORIGINAL: 32}, 32),
        ({"rope_parameters": inner}, within),
        ({"rope_parameters": rope}, without),
    ):
        scaling = config_of(kind, **stated).rope_scaling
        assert scaling is not None
        assert scaling.original_max_position_embeddings == expected


@pytest.mark.parametrize("kind", ["Gemma3", "Olmo3"])
@pytest.mark.parametrize("typed", [FULL, SLIDING])
def test_scaling_of_one_type_of_layer_counts_where_nothing_is_said_of_the_other(
    kind: str, typed: str
) -> None:
    other = SLIDING if typed == FULL else FULL
    sizes: dict[str, Any] = {"num_hidden_layers": 6, "sliding_window": 8, "head_dim": 16}
    found = config_of(kind, **sizes, rope_parameters={typed: YARN})
    assert [rope.scaling is not None for rope in found.ropes] == [typed == FULL, typed == SLIDING]
    for nothing in (None, {"rope_type": "default"}):
        assert config_of(kind, **sizes, rope_parameters={typed: YARN, other: nothing}) == found
    with pytest.raises(ModelLoadError, match="must have an object for each type of layer"):
        config_of(kind, **sizes, rope_parameters={typed: YARN, other: "default"})


@pytest.mark.parametrize(
    ("stated", "typed"),
    [
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, {}),
        ({}, {}),
        ({"rope_theta": 5.0, "rope_local_base_freq": 6.0}, {"rope_theta": 7.0}),
    ],
)
def test_bases_of_gemma_3_are_those_of_transformers_where_a_type_of_layer_states_none(
    stated: dict[str, Any], typed: dict[str, Any]
) -> None:
    from transformers import Gemma3TextConfig

    def ropes() -> dict[str, Any]:
        return {FULL: {"rope_type": "linear", "factor": 8.0, **typed}, SLIDING: {"rope_type": "default"}}

    expected: Any = Gemma3TextConfig(**stated, rope_parameters=ropes()).rope_parameters
    found = config_of("Gemma3", num_hidden_layers=6, sliding_window=8, **stated, rope_parameters=ropes())
    assert [rope.theta for rope in found.ropes] == [expected[kind]["rope_theta"] for kind in (FULL, SLIDING)]


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
