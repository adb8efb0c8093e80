"""Latent attention in GGUF files, which llama.cpp calls deepseek2: the header, and the projection from latents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gguf.constants import GGMLQuantizationType

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import GGUFHeader, GGUFTensor
from nbengine.models.configs.decoder_config import DecoderConfig

SIGMOID = 2
"""The number that stands for the sigmoid as the score of experts."""
_GROUPS = {160: (8, 3), 256: (8, 4)}
"""The groups of experts, and those that are chosen, of DeepSeek-V2 and -V3 by their numbers of experts: older files do
not say them."""


@dataclass(frozen=True)
class LatentTensor(GGUFTensor):
    """The projection from latents to keys and values, which files have as one tensor for each: `keys` is [heads,
    rank, nope], transposed, and `values` [heads, value, rank]."""

    keys: GGUFTensor
    values: GGUFTensor

    def parts(self, first_row: int, num_rows: int) -> Iterator[tuple[GGUFTensor, slice, bool]]:
        """Yield the matrices of the heads in some rows, each with its place among these, and whether it is
        transposed; the rows begin and end with heads."""
        heads, _, nope = self.keys.shape
        each = self.shape[0] // heads
        for head in range(first_row // each, (first_row + num_rows) // each):
            place = head * each - first_row
            yield _matrix(self.keys, head), slice(place, place + nope), True
            yield _matrix(self.values, head), slice(place + nope, place + each), False


def merge_projections(found: dict[str, GGUFTensor], config: DecoderConfig) -> None:
    """Put one tensor in the place of those for keys and values of each layer, where a file has them apart.

    Raises:
        ModelLoadError: one is missing, or they do not fit together.
    """
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.self_attn."
        pair = [found.pop(f"{prefix}{name}.weight", None) for name in ("k_b_proj", "v_b_proj")]
        if pair == [None, None]:
            continue
        keys, values = pair
        shapes = [None if tensor is None else tensor.shape for tensor in pair]
        if (
            keys is None
            or values is None
            or len(keys.shape) != len(values.shape)
            or len(keys.shape) != 3
            or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2])
        ):
            raise ModelLoadError(
                f"tensors attn_k_b and attn_v_b of layer {layer} have the shapes {shapes}, which do not fit together"
            )
        heads, rank, nope = keys.shape
        rows, size = heads * (nope + values.shape[1]), keys.num_bytes + values.num_bytes
        found[f"{prefix}kv_b_proj.weight"] = LatentTensor(
            keys.name, (rows, rank), GGMLQuantizationType.F32, keys.offset, size, keys, values
        )


def latent_entries(header: GGUFHeader) -> dict[str, Any]:
    """Return the entries of config.json that a header of deepseek2 describes beside the usual."""
    arch, found = header.architecture, header.metadata

    def integer(key: str, default: int) -> int:
        return header.integer(f"{arch}.{key}") if f"{arch}.{key}" in found else default

    def size(name: str) -> int:
        """Newer files have the sizes of a head under another name."""
        key = f"{arch}.attention.{name}"
        return header.integer(f"{key}_mla" if f"{key}_mla" in found else key)

    rope_dim = header.integer(f"{arch}.rope.dimension_count")
    num_experts = integer("expert_count", 0)
    is_sigmoid = integer("expert_gating_func", 1) == SIGMOID
    groups, chosen = _GROUPS.get(num_experts, (1, 1))
    groups = integer("expert_group_count", groups)
    chosen = integer("expert_group_used_count", chosen)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    if any(name.endswith("exp_probs_b.bias") for name in header.tensors):
        method = "noaux_tc"
    scale = f"{arch}.expert_weights_scale"
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_sigmoid else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_sigmoid else "deepseek_v2",
        "num_hidden_layers": header.integer(f"{arch}.block_count") - integer("nextn_predict_layers", 0),
        "head_dim": rope_dim,
        "q_lora_rank": integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": header.integer(f"{arch}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": size("key_length") - rope_dim,
        "v_head_dim": size("value_length"),
        "attention_bias": any(name.endswith("attn_kv_a_mqa.bias") for name in header.tensors),
        "n_routed_experts": num_experts,
        "n_shared_experts": integer("expert_shared_count", 0),
        "moe_intermediate_size": header.integer(f"{arch}.expert_feed_forward_length"),
        "first_k_dense_replace": integer("leading_dense_block_count", 0),
        "routed_scaling_factor": header.number(scale) if scale in found else 1.0,
        "norm_topk_prob": bool(found.get(f"{arch}.expert_weights_norm", False)),
        "scoring_func": "sigmoid" if is_sigmoid else "softmax",
        "topk_method": method,
        "n_group": groups,
        "topk_group": chosen,
        "rope_parameters": _rope(header),
    }


def _rope(header: GGUFHeader) -> dict[str, Any]:
    arch, found = header.architecture, header.metadata
    theta = f"{arch}.rope.freq_base"
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": header.number(theta) if theta in found else 10000.0,
    }
    scaling = f"{arch}.rope.scaling"
    if found.get(f"{scaling}.type") != "yarn":
        return rope
    rope |= {
        "rope_type": "yarn",
        "factor": header.number(f"{scaling}.factor"),
        "original_max_position_embeddings": header.integer(f"{scaling}.original_context_length"),
    }
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"{scaling}.{theirs}" in found:
            rope[ours] = header.number(f"{scaling}.{theirs}")
    # llama.cpp has a tenth of mscale_all_dim, and takes mscale for the same.
    multiplier = f"{scaling}.yarn_log_multiplier"
    if multiplier in found and header.number(multiplier) > 0:
        mscale = 10 * header.number(multiplier)
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return rope


def _matrix(tensor: GGUFTensor, head: int) -> GGUFTensor:
    size = tensor.num_bytes // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + head * size, num_bytes=size)
