"""The tensors of a GGUF file under the names of Hugging Face's checkpoints, by the tables of the `gguf` package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import GGUFHeader, GGUFTensor
from nbengine.models.checkpoints.gguf_latent import merge_projections
from nbengine.models.checkpoints.gguf_layouts import (
    RowOrder,
    StoredPart,
    as_in_checkpoints,
    placed,
    rows_of,
)
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.moe_config import NORMS_BESIDE
from nbengine.models.registry import load_family

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with which llama.cpp's converter expresses the llama3 kind of RoPE scaling."""
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""Those with which it expresses LongRoPE."""

_READ_WITH_CONFIG = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
_GLOBAL_NAMES = (
    "model.embed_tokens",
    "model.norm",
    "model.embedding_norm",
    "lm_head",
    "model.embed_tokens_per_layer",
    "model.per_layer_model_projection",
    "model.per_layer_projection_norm",
)
_INPUT_NAMES = (
    "layer_scalar",
    "per_layer_input_gate",
    "per_layer_projection",
    "post_per_layer_input_norm",
)
_ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "sinks")
_LATENT_NAMES = (
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "k_b_proj",
    "v_b_proj",
)
_DELTA_RULE_NAMES = (
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_a",
    "in_proj_b",
    "in_proj_ba",
    "in_proj_qkvz",
    "conv1d",
    "A_log",
    "dt_proj",
    "norm",
    "out_proj",
)
_STATE_SPACE_NAMES = ("in_proj", "conv1d", "A_log", "D", "dt_proj", "norm", "out_proj")
_CONVOLUTION_NAMES = ("in_proj", "conv", "out_proj")
_MLP_NAMES = (
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate",
    "gate.e_score_correction",
    "shared_expert.gate_proj",
    "shared_expert.up_proj",
    "shared_expert.down_proj",
    "shared_expert_gate",
    "experts.gate_proj",
    "experts.up_proj",
    "experts.gate_up_proj",
    "experts.down_proj",
)
_BLOCK_NAMES = (
    "norm",
    *(f"mixer.{name}" for name in (*_STATE_SPACE_NAMES, "q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mixer.{name}" for name in ("up_proj", "down_proj", "gate", "gate.e_score_correction")),
    *(
        f"mixer.{block}.{name}"
        for block in ("experts", "shared_experts")
        for name in ("up_proj", "down_proj")
    ),
)
"""The names in layers that are one block."""
_FUSED = "mlp.gate_up_proj"


def our_parts(header: GGUFHeader, config: DecoderConfig, *, permuted: bool) -> dict[str, StoredPart]:
    """Return the places of the file's weights under the names of the model, which has one for each projection and
    each expert; with `permuted` the rows of queries and keys are interleaved.

    Raises:
        ModelLoadError: the file has a tensor that the architecture does not have.
    """
    names, family, found = _names(header, config), load_family(config.family), {}
    unknown = []
    for name, tensor in header.tensors.items():
        if name in _READ_WITH_CONFIG or _layer_of(name) >= config.file_layers:
            continue
        theirs = _their_name(name, names)
        if theirs is None:
            unknown.append(name)
            continue
        for stated, matrix in as_in_checkpoints(theirs, tensor):
            parts = family.tensor_parts(config, stated, matrix.shape)
            for ours, rows, order in _joined(matrix, parts, config):
                found[ours] = placed(ours, rows, config, order, permuted=permuted)
    if config.latent is not None:
        _merge_latents(found, config)
    if unknown:
        raise ModelLoadError(
            f"{header.path} has {len(unknown)} tensors that are not supported, as {unknown[0]!r}"
        )
    return found


def _merge_latents(found: dict[str, StoredPart], config: DecoderConfig) -> None:
    """Put one weight in the place of those for keys and values of each layer, where a file has them apart."""
    apart = {name for name in found if name.endswith((".k_b_proj.weight", ".v_b_proj.weight"))}
    tensors = {name: found.pop(name).tensor for name in apart}
    merge_projections(tensors, config)
    found.update({name: StoredPart(tensor, tensor.shape) for name, tensor in tensors.items()})


def _joined(
    matrix: GGUFTensor, parts: Iterable[tuple[str, TensorPart]], config: DecoderConfig
) -> Iterator[tuple[str, GGUFTensor, RowOrder | None]]:
    """Yield our weights in a tensor: its rows, and their order where several weights' rows alternate.

    A file may have the rows of a projection by heads, between those of other projections, where the model has it as
    one; a family numbers such parts.
    """
    by_heads: dict[str, list[TensorPart]] = {}
    rule = config.delta_rule
    for ours, part in parts:
        *before, number, kind = ours.split(".")
        if number.isdigit() and rule is not None and not rule.by_head:
            by_heads.setdefault(".".join((*before, kind)), []).append(part)
        else:
            yield ours, rows_of(matrix, part.first_row, part.shape), None
    for ours, found in by_heads.items():
        yield ours, matrix, RowOrder(found[0].shape[0], tuple(part.first_row for part in found))


def _names(header: GGUFHeader, config: DecoderConfig) -> dict[str, str]:
    """Return Hugging Face's names by those of the file, both without "weight" or "bias"."""
    archs = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(archs.get(header.architecture, MODEL_ARCH.LLAMA), config.file_layers)
    names = {}
    if config.single_blocks:
        in_layers = (
            f"backbone.layers.{i}.{name}" for i in range(config.file_layers) for name in _BLOCK_NAMES
        )
    else:
        in_layers = (
            f"model.layers.{i}.{name}" for i in range(config.num_layers) for name in _in_layer(config, i)
        )
    for theirs in (*_GLOBAL_NAMES, *in_layers):
        # Of experts in one tensor the table has the usual names alone.
        is_stack = config.single_blocks and ".mixer.experts." in theirs
        usual = theirs.replace("backbone.", "model.").replace(".mixer.", ".mlp.") if is_stack else theirs
        ours = table.get_name(usual)
        if ours is not None:
            names[ours] = theirs
    return {ours: _fused(ours, theirs, header) for ours, theirs in names.items()}


def _in_layer(config: DecoderConfig, layer: int) -> Iterator[str]:
    """Yield the names of a layer's weights."""
    norms = config.norms
    for name in (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp):
        if name is not None:
            yield name
    if config.layer_scales:
        yield from _INPUT_NAMES
    if config.moe is not None and config.moe.beside_dense:
        yield from NORMS_BESIDE
    block: str
    inside: tuple[str, ...]
    block, inside = "self_attn", (*_ATTENTION_NAMES, *_LATENT_NAMES)
    if config.layer(layer).attention == "recurrent":
        block, inside = "conv", _CONVOLUTION_NAMES
        if config.delta_rule is not None:
            block, inside = "linear_attn", _DELTA_RULE_NAMES
        elif config.mamba2 is not None:
            block, inside = "mamba", _STATE_SPACE_NAMES
    yield from (f"{block}.{name}" for name in inside)
    # The name of gate and other projection in one is also that of the other projection alone.
    yield from (_FUSED, *(f"mlp.{name}" for name in _MLP_NAMES))


def _their_name(name: str, names: dict[str, str]) -> str | None:
    """Return Hugging Face's name of a file's tensor; None: the architecture has none like it."""
    if name in names:
        return names[name]
    base, _, kind = name.rpartition(".")
    if base not in names:
        return None
    # The converter calls this bias one of a projection that there is not.
    return f"{names[base]}.{kind}".replace(".dt_proj.bias", ".dt_bias")


def _fused(ours: str, theirs: str, header: GGUFHeader) -> str:
    """Return Hugging Face's name of the tensor that holds the gate, too, where the file has none by itself."""
    gate = ours.replace("ffn_up", "ffn_gate")
    if not theirs.endswith(".mlp.up_proj") or f"{gate}.weight" in header.tensors:
        return theirs
    return theirs.replace("up_proj", "gate_up_proj")


def _layer_of(name: str) -> int:
    """Return the number of a tensor's layer, -1 for a tensor of none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdigit() else -1
