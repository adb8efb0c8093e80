"""This module says in the terms of Hugging Face what the headers of models with recurrent layers say beside the usual.

Key names follow llama.cpp's converter (conversion/*.py) and the GGUF specification.
"""

from __future__ import annotations

from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import GGUFHeader
from nbengine.models.checkpoints.gguf_latent import SIGMOID
from nbengine.models.checkpoints.gguf_rope import rope_parameters
from nbengine.models.families.qwen_hybrid import TILED_VALUES, WHOLE_PROJECTIONS

Entries = dict[str, Any]
_FULL, _LINEAR, _MAMBA, _CONV = "full_attention", "linear_attention", "mamba", "conv"
_GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_BLOCK_TYPES = {"ssm_in": _MAMBA, "attn_q": "attention", "ffn_up_exps": "moe", "ffn_up": "mlp"}
"""The kinds of layers that are one block, by a tensor that each has."""
_SHARED, _TURNS = "expert_shared_feed_forward_length", "rope.scaling.finetuned"
_CONVERT_AGAIN = (
    "Convert the model again with llama.cpp's convert_hf_to_gguf.py, or use its safetensors files"
)


def qwen35(header: GGUFHeader) -> Entries:
    """Return the entries of Qwen3.5, dense or with experts. Its files have the value heads in another order."""
    rule = _delta_rule(header)
    return {**rule, TILED_VALUES: rule["linear_num_value_heads"] > rule["linear_num_key_heads"]}


def qwen3next(header: GGUFHeader) -> Entries:
    """Return the entries of Qwen3-Next."""
    return {**_delta_rule(header), WHOLE_PROJECTIONS: True}


def _delta_rule(header: GGUFHeader) -> Entries:
    arch = header.architecture
    value_heads = header.integer(f"{arch}.ssm.time_step_rank")
    return {
        "layer_types": [_LINEAR if recurrent else _FULL for recurrent in _recurrent_layers(header)],
        "linear_num_key_heads": header.integer(f"{arch}.ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": header.integer(f"{arch}.ssm.state_size"),
        "linear_value_head_dim": _quotient(header, "ssm.inner_size", "ssm.time_step_rank", value_heads),
        "linear_conv_kernel_dim": header.integer(f"{arch}.ssm.conv_kernel"),
    }


def _recurrent_layers(header: GGUFHeader) -> list[bool]:
    """Return whether each layer is recurrent: the file says it of each, or gives the distance of those that are not."""
    arch, count = header.architecture, header.num_layers
    stated = header.per_layer(f"{arch}.attention.recurrent_layers")
    if stated is not None:
        return [bool(each) for each in stated]
    interval = header.integer_or(f"{arch}.full_attention_interval", 4)
    if interval < 1:
        raise ModelLoadError(f"{header.path}: {arch}.full_attention_interval is {interval}")
    return [(layer + 1) % interval != 0 for layer in range(count)]


def granite(header: GGUFHeader) -> Entries:
    """Return the entries of Granite: with recurrent layers, with a block beside the experts, or without a rotary
    embedding it is a variant of Granite 4, else one of Granite 3. Bamba's files name the same architecture as those
    of Granite 4 with recurrent layers.

    Raises:
        ModelLoadError: the file does not tell the two apart, or lacks the scale of Granite's attention.
    """
    arch = header.architecture
    scales = {
        hf: header.number(f"{arch}.{key}")
        for hf, key in _GRANITE_SCALES.items()
        if f"{arch}.{key}" in header.metadata
    }
    if arch == "granitehybrid":
        if _is_bamba(header, has_scales=bool(scales)):
            return _bamba(header)
        _check_attention_scale(header)
    shared = header.integer_or(f"{arch}.{_SHARED}", 0)
    has_rope = header.metadata.get(f"{arch}.{_TURNS}", True)
    if arch != "granitehybrid" and not shared and has_rope:
        return scales
    num_experts = header.integer_or(f"{arch}.expert_count", 0)
    inner = header.largest(f"{arch}.feed_forward_length")
    entries: Entries = {
        **scales,
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention"] * header.num_layers,
        "position_embedding_type": "rope" if has_rope else "nope",
        "num_local_experts": num_experts,
        "shared_intermediate_size": shared if num_experts else inner,
    }
    if num_experts and not shared:
        raise ModelLoadError(
            f"{header.path}: {arch}.{_SHARED} is missing; experts without a block that all "
            "tokens share are supported in granitemoe files"
        )
    return entries if arch != "granitehybrid" else {**entries, **_state_space(header)}


def _is_bamba(header: GGUFHeader, *, has_scales: bool) -> bool:
    """Tell whether a file is one of Bamba, which has neither scales nor experts nor a block beside them, and whose
    heads are turned; llama.cpp's converter says of every model whether its heads are.

    Raises:
        ModelLoadError: nothing tells.
    """
    arch = header.architecture
    counts = [header.integer_or(f"{arch}.{key}", 0) for key in ("expert_count", _SHARED)]
    if has_scales or any(counts):
        return False
    key = f"{arch}.{_TURNS}"
    if key not in header.metadata:
        raise ModelLoadError(
            f"{header.path}: {key} is missing, which is true for Bamba and false for Granite 4. {_CONVERT_AGAIN}"
        )
    return bool(header.metadata[key])


def _check_attention_scale(header: GGUFHeader) -> None:
    """Refuse a file of Granite 4 without the scale of its attention: transformers takes 1 where nothing is said,
    llama.cpp the usual scale, and published models have neither."""
    key = f"{header.architecture}.attention.scale"
    if key not in header.metadata and any(_kv_heads(header)):
        raise ModelLoadError(
            f"{header.path}: {key} is missing, without which Granite 4 cannot run. {_CONVERT_AGAIN}"
        )


def _bamba(header: GGUFHeader) -> Entries:
    """Return the entries of Bamba, which has the layers of Granite 4 and none of its scales."""
    space = _state_space(header)
    types = space.pop("layer_types")
    return {
        **space,
        "model_type": "bamba",
        # What a file does not say is turned whole, unlike in the class.
        "rope_parameters": {"partial_rotary_factor": 1.0, **rope_parameters(header)},
        "architectures": ["BambaForCausalLM"],
        "attn_layer_indices": [layer for layer, kind in enumerate(types) if kind != _MAMBA],
    }


def _state_space(header: GGUFHeader) -> Entries:
    arch = header.architecture
    heads, hidden = header.integer(f"{arch}.ssm.time_step_rank"), header.integer(f"{arch}.embedding_length")
    return {
        "layer_types": ["attention" if count else _MAMBA for count in _kv_heads(header)],
        "mamba_n_heads": heads,
        "mamba_d_head": _quotient(header, "ssm.inner_size", "ssm.time_step_rank", heads),
        "mamba_expand": _quotient(header, "ssm.inner_size", "embedding_length", hidden),
        "mamba_n_groups": header.integer(f"{arch}.ssm.group_count"),
        "mamba_d_state": header.integer(f"{arch}.ssm.state_size"),
        "mamba_d_conv": header.integer(f"{arch}.ssm.conv_kernel"),
        "mamba_conv_bias": header.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": header.has_tensor("ssm_in.bias"),
    }


def lfm2(header: GGUFHeader) -> Entries:
    """Return the entries of LFM2."""
    arch = header.architecture
    return {
        "layer_types": [_FULL if count else _CONV for count in _kv_heads(header)],
        "conv_L_cache": header.integer(f"{arch}.shortconv.l_cache"),
        "conv_bias": header.has_tensor("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": header.number(f"{arch}.attention.layer_norm_rms_epsilon"),
    }


def lfm2moe(header: GGUFHeader) -> Entries:
    """Return the entries of LFM2 with experts, whose weights are always divided by their sum."""
    arch = header.architecture
    gating = header.integer(f"{arch}.expert_gating_func")
    if gating != SIGMOID:
        raise ModelLoadError(f"{header.path}: {arch}.expert_gating_func {gating} is not supported")
    return {
        **lfm2(header),
        "moe_intermediate_size": header.integer(f"{arch}.expert_feed_forward_length"),
        "num_dense_layers": header.integer_or(f"{arch}.leading_dense_block_count", 0),
        "use_expert_bias": header.has_tensor("exp_probs_b.bias"),
        "norm_topk_prob": True,
    }


def mamba2(header: GGUFHeader) -> Entries:
    """Return the entries of Mamba-2."""
    arch = header.architecture
    heads, hidden = header.integer(f"{arch}.ssm.time_step_rank"), header.integer(f"{arch}.embedding_length")
    return {
        "num_heads": heads,
        "head_dim": _quotient(header, "ssm.inner_size", "ssm.time_step_rank", heads),
        "expand": _quotient(header, "ssm.inner_size", "embedding_length", hidden),
        "n_groups": header.integer(f"{arch}.ssm.group_count"),
        "state_size": header.integer(f"{arch}.ssm.state_size"),
        "conv_kernel": header.integer(f"{arch}.ssm.conv_kernel"),
        "layer_norm_epsilon": header.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "use_conv_bias": header.has_tensor("ssm_conv1d.bias"),
        "use_bias": header.has_tensor("ssm_in.bias"),
    }


def nemotron_h(header: GGUFHeader) -> Entries:
    """Return the entries of Nemotron-H, dense or with experts, each of whose layers is one block.

    Raises:
        ModelLoadError: a layer is of no kind that is known, experts are in groups, of which the file does not say how
            many are chosen, or they compute latents.
    """
    arch = header.architecture
    heads = header.integer(f"{arch}.ssm.time_step_rank")
    for key, usual in (("expert_group_count", 1), ("moe_latent_size", 0)):
        stated = header.integer_or(f"{arch}.{key}", usual)
        if stated > usual:
            raise ModelLoadError(f"{header.path}: {arch}.{key} {stated} is not supported")
    # The header has the numbers of experts' features in its place.
    inner = [each.shape[0] for name, each in header.tensors.items() if name.endswith(".ffn_up.weight")]
    entries: Entries = {
        **({"intermediate_size": inner[0]} if inner else {}),
        "layers_block_type": [_block_type(header, layer) for layer in range(header.num_layers)],
        "layer_norm_epsilon": header.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": _quotient(header, "ssm.inner_size", "ssm.time_step_rank", heads),
        "n_groups": header.integer(f"{arch}.ssm.group_count"),
        "ssm_state_size": header.integer(f"{arch}.ssm.state_size"),
        "conv_kernel": header.integer(f"{arch}.ssm.conv_kernel"),
        "use_conv_bias": header.has_tensor("ssm_conv1d.bias"),
        "use_bias": header.has_tensor("ssm_in.bias"),
        "mlp_bias": header.has_tensor("ffn_up.bias"),
    }
    if not header.integer_or(f"{arch}.expert_count", 0):
        return entries
    return {
        **entries,
        "n_routed_experts": header.integer(f"{arch}.expert_count"),
        "moe_intermediate_size": header.integer(f"{arch}.expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": header.integer(f"{arch}.{_SHARED}"),
        "norm_topk_prob": header.metadata.get(f"{arch}.expert_weights_norm", True),
        "routed_scaling_factor": header.metadata.get(f"{arch}.expert_weights_scale", 1.0),
    }


def _block_type(header: GGUFHeader, layer: int) -> str:
    """Return the kind of a layer that is one block, which its tensors tell."""
    for tensor, kind in _BLOCK_TYPES.items():
        if f"blk.{layer}.{tensor}.weight" in header.tensors:
            return kind
    raise ModelLoadError(f"{header.path}: layer {layer} has none of the tensors {', '.join(_BLOCK_TYPES)}")


def _kv_heads(header: GGUFHeader) -> tuple[int | float | bool, ...]:
    """Return the number of each layer's key heads, 0 for a recurrent one."""
    key = f"{header.architecture}.attention.head_count_kv"
    stated = header.per_layer(key)
    if stated is None:
        raise ModelLoadError(f"{header.path}: metadata key {key} is missing")
    return stated


def _quotient(header: GGUFHeader, of: str, by: str, number: int) -> int:
    """Return the number at the key `of` divided by `number`, which is that at the key `by`."""
    arch = header.architecture
    total = header.integer(f"{arch}.{of}")
    if number < 1 or total < 1 or total % number:
        raise ModelLoadError(
            f"{header.path}: {arch}.{of} ({total}) must be a multiple of {arch}.{by} ({number})"
        )
    return total // number
