"""Metadata that llama.cpp's converter writes of one architecture alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PREDICTED = 1
"""The layers of a file of GLM-4.5 behind the last one, which predict further tokens."""


def of_full_layers(config: dict[str, Any]) -> dict[str, int]:
    """The sizes that the layers of Gemma 4 which see everything have of their own."""
    found: dict[str, int] = next(iter(config["per_layer_config"].values()))
    return found


def still_pairs(config: dict[str, Any]) -> list[float]:
    """The divisors of the rotary frequencies of Gemma 4's full layers, most of whose pairs do not turn."""
    part = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    size = of_full_layers(config)["head_dim"]
    turned = int(size * part / 2)
    return [1.0] * turned + [1e30] * (size // 2 - turned)


OF_STATES = (".conv1d.weight", ".A_log", ".D", ".mixer.norm.weight", ".dt_bias")
"""The endings of what a block with a state has in another form."""


def nemotron_name(name: str) -> str:
    """The name that a tensor of Nemotron-H has in published files, with an ending."""
    name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
    return name.replace("model.layers.", "backbone.layers.").replace("model.norm_f", "backbone.norm_f")


def gemma4_name(name: str) -> str:
    """The name that a tensor has with an ending that tells weights from scales."""
    if name.endswith((".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")):
        return f"{name}.weight"
    name = name.replace(".router.per_expert_scale", ".experts.down_proj.scale")
    return name.replace(".router.scale", ".router.proj.scale")


def metadata(arch: str, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The metadata that the class of an architecture writes besides, or otherwise."""
    match arch:
        case "mistral3":
            rope = config["rope_parameters"]
            yield "mistral3.rope.scaling.yarn_log_multiplier", rope["mscale_all_dim"]
            yield "mistral3.attention.temperature_scale", rope["llama_4_scaling_beta"]
        case "exaone4" if config["sliding_window"] is not None:
            yield "exaone4.attention.sliding_window", config["sliding_window"]
            pattern = [each == "sliding_attention" for each in config["layer_types"]]
            yield "exaone4.attention.sliding_window_pattern", pattern
        case "gemma4":
            full = [each == "full_attention" for each in config["layer_types"]]
            own = of_full_layers(config)
            count, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
            yield "gemma4.attention.sliding_window", config["sliding_window"]
            yield "gemma4.attention.sliding_window_pattern", [not each for each in full]
            yield "gemma4.attention.key_length", own["head_dim"]
            yield "gemma4.attention.value_length", own["head_dim"]
            yield "gemma4.attention.key_length_swa", config["head_dim"]
            yield "gemma4.attention.value_length_swa", config["head_dim"]
            yield "gemma4.attention.shared_kv_layers", shared
            yield "gemma4.embedding_length_per_layer_input", config["hidden_size_per_layer_input"]
            yield "gemma4.rope.dimension_count", own["head_dim"]
            yield "gemma4.rope.dimension_count_swa", config["head_dim"]
            if config["use_double_wide_mlp"]:
                wide = [1 + (layer >= count - shared) for layer in range(count)]
                yield "gemma4.feed_forward_length", [config["intermediate_size"] * each for each in wide]
            if "num_key_value_heads" in own:
                heads = config["num_key_value_heads"], own["num_key_value_heads"]
                yield "gemma4.attention.head_count_kv", [heads[each] for each in full]
            yield "gemma4.final_logit_softcapping", config["final_logit_softcapping"]
        case "nemotron_h" | "nemotron_h_moe":
            kinds, heads = config["layers_block_type"], config["mamba_num_heads"]
            of_kind = {"full_attention": config["num_key_value_heads"]}
            inner = config["moe_intermediate_size" if arch.endswith("moe") else "intermediate_size"]
            wide = "moe" if arch.endswith("moe") else "mlp"
            yield f"{arch}.attention.head_count_kv", [of_kind.get(kind, 0) for kind in kinds]
            yield f"{arch}.feed_forward_length", [inner * (kind == wide) for kind in kinds]
            yield f"{arch}.ssm.conv_kernel", config["conv_kernel"]
            yield f"{arch}.ssm.state_size", config["ssm_state_size"]
            yield f"{arch}.ssm.group_count", config["n_groups"]
            yield f"{arch}.ssm.inner_size", heads * config["mamba_head_dim"]
            yield f"{arch}.ssm.time_step_rank", heads
            if arch == "nemotron_h_moe":
                yield f"{arch}.expert_used_count", config["num_experts_per_tok"]
                yield f"{arch}.expert_feed_forward_length", config["moe_intermediate_size"]
                shared = config["moe_shared_expert_intermediate_size"]
                yield f"{arch}.expert_shared_feed_forward_length", shared
                yield f"{arch}.expert_count", config["n_routed_experts"]
                yield f"{arch}.expert_shared_count", config["n_shared_experts"]
                yield f"{arch}.expert_weights_norm", config["norm_topk_prob"]
                yield f"{arch}.expert_weights_scale", config["routed_scaling_factor"]
                yield f"{arch}.expert_group_count", config["n_group"]
        case "glm4moe":
            yield "glm4moe.block_count", config["num_hidden_layers"] + PREDICTED
            yield "glm4moe.nextn_predict_layers", PREDICTED
            yield "glm4moe.expert_count", config["n_routed_experts"]
            yield "glm4moe.expert_used_count", config["num_experts_per_tok"]
            yield "glm4moe.expert_shared_count", config["n_shared_experts"]
            yield "glm4moe.leading_dense_block_count", config["first_k_dense_replace"]
            yield "glm4moe.expert_gating_func", 2
            yield "glm4moe.expert_weights_scale", config["routed_scaling_factor"]
            yield "glm4moe.expert_weights_norm", config["norm_topk_prob"]
            yield "glm4moe.expert_group_count", config["n_group"]
            yield "glm4moe.expert_group_used_count", config["topk_group"]
