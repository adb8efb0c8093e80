"""The configurations of models with recurrent layers: what is taken from them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nbengine.config import ParallelConfig
from nbengine.errors import InvalidArgumentError, ModelLoadError
from nbengine.models.configs.pooling_config import longest_model_len
from nbengine.models.division import check_parallel
from nbengine.models.registry import decoder_config, has_experts
from tests.support.recurrent_cases import hf_of


@pytest.mark.parametrize(
    ("name", "setting", "value", "message"),
    [
        ("granite 4", "layer_types", ["conv"] * 4, "layer_types must be a list of 'attention'"),
        ("granite 4", "mamba_n_groups", 3, r"mamba_n_heads \(8\) must be a multiple of mamba_n_groups \(3\)"),
        ("granite 4", "mamba_d_head", 5, r"times mamba_d_head \(5\) must be mamba_expand times"),
        ("granite 4", "mamba_d_conv", 1, "mamba_d_conv must be at least 2"),
        ("granite 4", "time_step_limit", [1], "time_step_limit must be two numbers"),
        ("granite 4", "time_step_limit", [0.5, 0.1], "in ascending order, got 0.5 and 0.1"),
        (
            "qwen3.5",
            "layer_types",
            ["sliding_attention"] * 4,
            "layer_types must be a list of 'full_attention'",
        ),
        ("qwen3.5", "linear_num_value_heads", 3, r"linear_num_value_heads \(3\) must be a multiple of"),
        ("bamba", "attn_layer_indices", [4], "attn_layer_indices must be a list of numbers from 0 to 3"),
        ("mamba-2", "n_groups", 3, r"mamba_n_heads \(8\) must be a multiple of mamba_n_groups \(3\)"),
        ("lfm2", "layer_types", ["mamba"] * 4, "layer_types must be a list of 'conv'"),
        ("lfm2", "conv_L_cache", 1, "conv_L_cache must be at least 2"),
        ("qwen3.5", "linear_conv_kernel_dim", 1, "linear_conv_kernel_dim must be at least 2, got 1"),
        ("qwen3.5", "hidden_act", "gelu", "hidden_act must be 'silu' or 'swish' in a model with recurrent"),
        ("granite 4", "hidden_act", "gelu", "hidden_act must be 'silu' or 'swish' in a model with recurrent"),
        ("bamba", "hidden_act", "relu", "hidden_act must be 'silu' or 'swish' .* layers, got 'relu'"),
        ("mamba-2", "hidden_act", "relu", "hidden_act must be 'silu' or 'swish' .* layers, got 'relu'"),
        ("nemotron-h", "mamba_hidden_act", "gelu", "mamba_hidden_act must be 'silu' or 'swish'"),
    ],
)
def test_what_a_configuration_says_wrong_is_told_by_name(
    name: str, setting: str, value: Any, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        decoder_config({**hf_of(name), setting: value})


def test_layers_with_attention_alone_have_the_activation_of_the_file() -> None:
    name = "granite 4 without recurrent layers"
    assert decoder_config({**hf_of(name), "hidden_act": "gelu"}).hidden_act == "gelu"


def test_every_layer_of_qwen_35_has_experts_and_the_blocks_of_granite_4_have_no_biases() -> None:
    qwen, granite = hf_of("qwen3.5 moe"), hf_of("granite 4 moe")
    assert decoder_config({**qwen, "mlp_only_layers": [1], "decoder_sparse_step": 2}) == decoder_config(qwen)
    assert decoder_config({**granite, "mlp_bias": True}) == decoder_config(granite)


def test_every_fourth_layer_has_attention_where_nothing_is_said() -> None:
    hf = {**hf_of("qwen3.5"), "num_hidden_layers": 8}
    del hf["layer_types"]
    kinds = [layer.attention for layer in decoder_config(hf).layers]
    assert kinds == (["recurrent"] * 3 + ["full"]) * 2


def test_a_model_without_positions_takes_long_texts() -> None:
    hf = hf_of("mamba-2")
    assert "max_position_embeddings" not in hf
    assert longest_model_len(hf) == decoder_config(hf).max_position_embeddings == 131_072


def test_names_of_files_before_transformers_5_are_known() -> None:
    hf = hf_of("lfm2")
    del hf["layer_types"], hf["tie_word_embeddings"]
    old = {**hf, "full_attn_idxs": [2], "tie_embedding": False, "block_ff_dim": 96}
    config = decoder_config(old)
    assert [layer.attention for layer in config.layers] == ["recurrent", "recurrent", "full", "recurrent"]
    assert (config.tie_word_embeddings, config.intermediate_size) == (False, 64)
    with pytest.raises(ModelLoadError, match="full_attn_idxs must be a list of numbers from 0 to 3"):
        decoder_config({**old, "full_attn_idxs": [4]})
    granite = decoder_config({**hf_of("granite 4"), "layer_types": ["mamba", "attention"] * 2})
    assert [layer.attention for layer in granite.layers] == ["recurrent", "full"] * 2


def test_older_names_of_nemotron_h_count_where_the_newer_ones_are_missing() -> None:
    hf = {**hf_of("nemotron-h"), "conv_kernel": 3, "use_conv_bias": False}
    older = {
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "time_step_min": "mamba_dt_min",
        "use_conv_bias": "mamba_conv_bias",
    }
    old = {older.get(key, key): value for key, value in hf.items()}
    assert decoder_config(old) == decoder_config(hf)
    unlimited = decoder_config({**old, "mamba_dt_min": 0.0}).mamba2
    assert unlimited is not None
    assert unlimited.least_step == 0.0


def test_limits_of_a_step_are_those_of_the_file_and_infinity_as_transformers_writes_it() -> None:
    infinite = decoder_config(
        {**hf_of("granite 4"), "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    ).mamba2
    limited = decoder_config({**hf_of("granite 4"), "time_step_limit": [0.25, 2]}).mamba2
    assert infinite is not None
    assert limited is not None
    assert (infinite.least_step, infinite.most_step) == (0.0, float("inf"))
    assert (limited.least_step, limited.most_step) == (0.25, 2.0)


def test_a_recurrent_layer_says_how_many_bytes_it_keeps_of_a_request() -> None:
    granite, lfm2 = (decoder_config(hf_of(name)).cache_rules() for name in ("granite 4", "lfm2"))
    channels = 2 * 64 + 2 * 2 * 24
    assert [rule.kind for rule in granite] == ["recurrent", "full", "recurrent", "recurrent"]
    assert {rule.size for rule in granite} == {0, 4 * (channels * 3 + 2 * 64 * 24)}
    assert [rule.kind for rule in lfm2] == ["recurrent", "full", "recurrent", "recurrent"]
    assert {rule.size for rule in lfm2} == {0, 4 * 64 * 2}
    qwen = decoder_config(hf_of("qwen3.5")).cache_rules()
    assert [rule.kind for rule in qwen] == ["recurrent", "full", "recurrent", "recurrent"]
    assert {rule.size for rule in qwen} == {0, 4 * ((2 * 2 * 16 + 4 * 24) * 3 + 4 * 16 * 24)}


def test_only_models_with_experts_have_their_engine_cores_compute_together() -> None:
    assert has_experts(hf_of("granite 4 moe"))
    assert not has_experts(hf_of("granite 4"))


@pytest.mark.parametrize(
    ("name", "size", "settings", "message"),
    [
        ("granite 4", 2, {"mamba_n_groups": 8, "mamba_n_heads": 8, "mamba_expand": 2}, None),
        ("granite 4", 2, {"mamba_n_groups": 3, "mamba_n_heads": 6, "hidden_size": 96}, "6 heads in 3 groups"),
        ("qwen3.5", 2, {}, None),
        ("qwen3.5", 4, {}, "2 key heads in recurrent layers"),
    ],
)
def test_ranks_that_cannot_share_the_heads_of_recurrent_layers_are_refused(
    name: str, size: int, settings: dict[str, Any], message: str | None
) -> None:
    hf = hf_of(name, num_attention_heads=8, num_key_value_heads=8, **settings)
    if message is None:
        check_parallel(hf, ParallelConfig(tensor_parallel_size=size))
        return
    with pytest.raises(InvalidArgumentError, match=message):
        check_parallel(hf, ParallelConfig(tensor_parallel_size=size))
