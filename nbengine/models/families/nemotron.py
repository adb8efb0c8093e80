"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer of a file is one block, with a state, attention or neither."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart, stacked_parts
from nbengine.models.configs.decoder_config import DecoderConfig, LayerConfig
from nbengine.models.configs.hf_config import number, positive
from nbengine.models.configs.moe_config import GroupedRouting, MoEConfig
from nbengine.models.configs.recurrent_config import Mamba2Config
from nbengine.models.families.granite_hybrid import stacked_state_space
from nbengine.models.families.recurrent_layers import check_activation, switch
from nbengine.models.family import DecoderFamily

_STATE, _ATTENTION, _DENSE, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_KINDS: Mapping[str, str] = {
    **{kind: kind for kind in (_STATE, _ATTENTION, _DENSE, _EXPERTS)},
    "mamba": _STATE,
    "attention": _ATTENTION,
    "M": _STATE,
    "*": _ATTENTION,
    "-": _DENSE,
    "E": _EXPERTS,
}
"""The kinds of blocks by the names that configurations and patterns have for them."""
_USUAL = [_STATE, _EXPERTS, _ATTENTION, _DENSE]
_LAYERS = "nbengine_layers"
_IN_LAYER = re.compile(r"layers\.(?P<layer>\d+)\.(?P<part>norm|mixer)\.(?P<rest>.*)")
_OUTSIDE: Mapping[str, str] = {
    "embeddings.": "model.embed_tokens.",
    "norm_f.": "model.norm.",
    "lm_head.": "lm_head.",
}
_RENAMED: Mapping[str, str] = {
    "shared_experts.": "shared_expert.",
    "e_score_correction.bias": "e_score_correction_bias",
}
_NUM_DIMENSIONS = 3
_OLD_NAMES: Mapping[str, str] = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_min": "mamba_dt_min",
    "use_conv_bias": "mamba_conv_bias",
}
"""Entries with the names that older files have for them, which count where the newer ones are missing."""

Blocks = tuple[str, str | None]
"""The kinds of a layer's first block and of its feed-forward block, if there is one."""


class NemotronH(DecoderFamily):
    """Nemotron-H and those after it: a layer of the model has a block with a state, or attention without positions, of a
    file, and the feed-forward block that follows it there, which has no gate."""

    title = "Nemotron-H, Nano 2, Nemotron 3 Nano"
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21_504,
        "max_position_embeddings": 4096,
    }
    unused: tuple[str, ...] = ("mtp.",)

    def shares_experts(self, hf: Mapping[str, Any]) -> bool:
        """See `Family.shares_experts`."""
        stated = _stated(hf)
        return isinstance(stated, list | str) and any(_KINDS.get(str(kind)) == _EXPERTS for kind in stated)

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; the layers are those of the model."""
        layers = _layers(hf)
        old = {new: hf.get(name) for new, name in _OLD_NAMES.items() if hf.get(new) is None}
        stated = {
            **hf,
            **old,
            "num_hidden_layers": len(layers),
            "rms_norm_eps": number({"layer_norm_epsilon": 1e-5, **hf}, "layer_norm_epsilon"),
            "hidden_act": hf.get("mlp_hidden_act", "relu2"),
            _LAYERS: layers,
        }
        return super().config(stated)

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        layers: list[Blocks] = hf[_LAYERS]
        space = _state_space(hf)
        has_bias = switch(hf, "mlp_bias", default=False)
        has_experts = any(block == _EXPERTS for _, block in layers)
        if has_experts and has_bias:
            raise ModelLoadError("config.json: mlp_bias with experts is not supported")
        own = tuple(_layer(mixer, space, has_mlp=block is not None) for mixer, block in layers)
        check_activation(hf, own, "mamba_hidden_act")
        return {
            "mlp_bias": has_bias,
            "gated": False,
            "single_blocks": True,
            # transformers has a projection of its own, whatever the configuration says.
            "tie_word_embeddings": False,
            "intermediate_size": (
                positive(hf, "intermediate_size") if any(block == _DENSE for _, block in layers) else 0
            ),
            "moe": _experts(hf, layers) if has_experts else None,
            "mamba2": space if any(block == _STATE for block, _ in layers) else None,
            "layers": own,
        }

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`; files call the model `backbone` or `model`."""
        found = _IN_LAYER.fullmatch(_inside(name))
        if found is None:
            yield from super().tensor_parts(config, name, shape)
            return
        places = [place for index, layer in enumerate(config.layers) for place in _places(index, layer)]
        number = int(found["layer"])
        if number >= len(places):
            raise ModelLoadError(f"tensor {name}: the configuration has {len(places)} layers")
        index, kind = places[number]
        yield from _in_layer(config, name, shape, f"model.layers.{index}", kind, found["part"], found["rest"])

    def our_name(self, name: str) -> str:
        """See `DecoderFamily.our_name`; of a tensor that is in no layer."""
        own = _inside(name)
        for theirs, ours in _OUTSIDE.items():
            if own.startswith(theirs):
                return own.replace(theirs, ours, 1)
        return name


def _layer(mixer: str, space: Mamba2Config, *, has_mlp: bool) -> LayerConfig:
    has_state = mixer == _STATE
    size = space.state_bytes if has_state else 0
    return LayerConfig("recurrent" if has_state else "full", size, rope=None, has_mlp=has_mlp)


def _places(index: int, layer: LayerConfig) -> Iterator[tuple[int, str]]:
    """Yield the blocks of a layer, which are layers of a file: the layer's number, and what block it is."""
    yield index, "linear_attn" if layer.attention == "recurrent" else "self_attn"
    if layer.has_mlp:
        yield index, "mlp"


def _inside(name: str) -> str:
    """Return the name of a tensor inside the model."""
    return name.removeprefix("backbone.").removeprefix("model.")


def _in_layer(
    config: DecoderConfig, name: str, shape: tuple[int, ...], layer: str, kind: str, part: str, rest: str
) -> Iterator[tuple[str, TensorPart]]:
    """Yield what a tensor of a block holds; `rest` is its name inside the block."""
    if part == "norm":
        norm = config.norms.before_mlp if kind == "mlp" else config.norms.before_attention
        yield f"{layer}.{norm}.{rest}", TensorPart(name, shape)
        return
    block = f"{layer}.{kind}"
    stacked = (
        None if config.mamba2 is None else stacked_state_space(config.mamba2).get(rest.partition(".")[0])
    )
    if kind == "linear_attn" and stacked is not None:
        for stated, found in stacked_parts(name, shape, stacked):
            *_, projection, ending = stated.split(".")
            yield f"{block}.{projection}.{ending}", found
    elif len(shape) == _NUM_DIMENSIONS and rest.startswith("experts."):
        projection = rest.removeprefix("experts.").removesuffix(".weight")
        for expert in range(shape[0]):
            yield f"{block}.experts.{expert}.{projection}.weight", TensorPart(name, shape[1:], expert)
    else:
        for theirs, ours in _RENAMED.items():
            rest = rest.replace(theirs, ours)
        yield f"{block}.{rest}", TensorPart(name, shape)


def _stated(hf: Mapping[str, Any]) -> Any:
    """Return what a configuration says of the kinds of its blocks, under the name that it has for them."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    return next((hf[name] for name in names if hf.get(name)), _USUAL)


def _layers(hf: Mapping[str, Any]) -> list[Blocks]:
    """Return the blocks of each layer of the model.

    Raises:
        ModelLoadError: a block is of no known kind, or a feed-forward block follows no other block.
    """
    stated = _stated(hf)
    if not isinstance(stated, list | str) or not all(str(kind) in _KINDS for kind in stated):
        names = ", ".join(map(repr, (_STATE, _ATTENTION, _DENSE, _EXPERTS)))
        raise ModelLoadError(
            f"config.json: layers_block_type must be a list of {names}, or hybrid_override_pattern a text of M, *, - and "
            f"E, got {quoted(stated)}"
        )
    layers: list[Blocks] = []
    for kind in (_KINDS[str(each)] for each in stated):
        if kind in (_STATE, _ATTENTION):
            layers.append((kind, None))
        elif layers and layers[-1][1] is None:
            layers[-1] = layers[-1][0], kind
        else:
            raise ModelLoadError(
                "config.json: a feed-forward block that follows neither a state nor attention is not supported, got "
                f"{quoted(stated)}"
            )
    return layers


def _state_space(hf: Mapping[str, Any]) -> Mamba2Config:
    # Zero says that no step is too short.
    least = 0.0 if hf.get("time_step_min") == 0 else number(hf, "time_step_min", 0.001)
    has_bias = switch(hf, "use_bias", default=False)
    return Mamba2Config(
        heads=positive(hf, "mamba_num_heads", 128),
        head_dim=positive(hf, "mamba_head_dim", 64),
        groups=positive(hf, "n_groups", 8),
        state_size=positive(hf, "ssm_state_size", 128),
        kernel=positive(hf, "conv_kernel", 4),
        conv_bias=switch(hf, "use_conv_bias", default=True),
        proj_bias=has_bias,
        least_step=least,
        most_step=math.inf,
    )


def _experts(hf: Mapping[str, Any], layers: list[Blocks]) -> MoEConfig:
    if hf.get("moe_latent_size") is not None:
        raise ModelLoadError("config.json: moe_latent_size, experts of latents, is not supported")
    routing = GroupedRouting(
        "sigmoid",
        groups=positive(hf, "n_group", 1),
        chosen_groups=positive(hf, "topk_group", 1),
        has_correction=True,
        scale=number({"routed_scaling_factor": 1.0, **hf}, "routed_scaling_factor"),
    )
    return MoEConfig(
        num_experts=positive(hf, "n_routed_experts", 8),
        experts_per_token=positive(hf, "num_experts_per_tok", 2),
        intermediate_size=positive(hf, "moe_intermediate_size", 7688),
        renormalize=switch(hf, "norm_topk_prob", default=True),
        shared_intermediate_size=positive(hf, "moe_shared_expert_intermediate_size", 7688),
        shared_gate=False,
        dense_layers=tuple(index for index, (_, block) in enumerate(layers) if block == _DENSE),
        routing=routing,
        hidden_act="relu2",
        gated=False,
    )
