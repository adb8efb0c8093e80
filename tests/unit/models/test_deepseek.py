"""DeepSeek's configurations and checkpoints are read, and those that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, LATENT
from safetensors.torch import load_file, save_file

from nbengine.errors import ModelLoadError
from nbengine.kv_cache.specs import FullAttentionSpec, make_groups
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.registry import decoder_config

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "softmax",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
V3: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}


def config_of(hf: dict[str, Any], **changes: Any) -> DecoderConfig:
    return decoder_config({**hf, **changes})


def test_a_token_takes_a_latent_and_one_turned_key_in_every_layer() -> None:
    config = config_of(V2_LITE)
    assert (config.cache_parts, config.num_kv_heads, config.head_dim) == (1, 1, 512 + 64)
    groups = make_groups(config.cache_rules())
    assert groups.attention == (FullAttentionSpec(),)
    assert groups.num_tensors(range(27)) == 27


def test_sizes_of_v2_lite_are_read() -> None:
    config = config_of(V2_LITE)
    assert config.latent is not None
    assert config.latent.query_rank is None
    assert (config.latent.nope_dim, config.latent.value_dim) == (128, 128)
    mscale = 0.1 * 0.707 * 3.6888794541139363 + 1
    assert config.attention_scale == pytest.approx(192**-0.5 * mscale**2)
    assert config.rope_scaling is not None
    assert config.rope_scaling.attention_factor == 1
    assert config.moe is not None
    assert config.moe.dense_layers == (0,)
    assert (config.moe.shared_intermediate_size, config.moe.renormalize) == (2816, False)


def test_sizes_of_v3_are_read_stated_or_not() -> None:
    assumed = ("q_lora_rank", "n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob")
    short = {key: value for key, value in V3.items() if key not in assumed}
    assert config_of(V3) == config_of(short)
    routing = config_of(V3).moe.routing  # type: ignore[union-attr]
    assert routing is not None
    assert (routing.score, routing.groups, routing.chosen_groups, routing.has_correction) == (
        "sigmoid",
        8,
        4,
        True,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob must be false"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"topk_method": "random"}, "topk_method must be one of greedy, group_limited_greedy, noaux_tc"),
        ({"scoring_func": "tanh"}, "scoring_func must be one of softmax, sigmoid"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer"),
        ({"topk_method": "group_limited_greedy", "n_group": 7}, r"n_group \(7\) must divide"),
        ({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 9}, "be at most n_group"),
        ({"topk_method": "group_limited_greedy", "n_group": 32}, r"experts in topk_group groups \(2\)"),
        ({"num_experts_per_tok": 65}, r"num_experts_per_tok \(65\) must be at most"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config_of(V2_LITE, **changes)


def test_layers_that_predict_further_tokens_are_not_loaded(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    case = CASES["deepseek v3"]
    oracle = random_model(case.kind, **case.settings)
    oracle.save_pretrained(tmp_path)
    path, tokens = tmp_path / "model.safetensors", list(range(3, 40))
    weights = load_file(path)
    further = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in weights.items()
        if "layers.2." in name
    }
    weights |= further | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    save_file(weights, path, {"format": "pt"})
    found = make_runner(load(tmp_path)).step({"a": tokens})["a"]
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    weights["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match="tensors that its architecture does not use"):
        load(tmp_path)


def test_the_weights_of_a_rank_are_its_heads_and_all_latents(
    tmp_path: Path, load: Any, random_model: Any
) -> None:
    from parallel_support import ThreadWorld

    case = CASES["deepseek v3"]
    random_model(case.kind, **case.settings).save_pretrained(tmp_path)
    model = load(tmp_path, parallel=ThreadWorld(2, 1).states[1])
    shapes = {name: tuple(slot.tensor.shape) for name, slot in model.weight_slots().items()}
    prefix, each = "model.layers.0.self_attn", LATENT["qk_nope_head_dim"] + LATENT["v_head_dim"]
    assert shapes[f"{prefix}.kv_b_proj.weight"] == (2 * each, LATENT["kv_lora_rank"])
    assert shapes[f"{prefix}.kv_a_proj_with_mqa.weight"] == (24 + 8, 64)
    assert model.shard.num_kv_heads == 1
