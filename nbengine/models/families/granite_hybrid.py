"""Granite 4: layers with the state space of Mamba-2 between layers with attention, or attention alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart, stacked_parts
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.hf_config import positive
from nbengine.models.configs.moe_config import MoEConfig, num_experts_of
from nbengine.models.configs.recurrent_config import Mamba2Config
from nbengine.models.families.granite import Granite, GraniteMoe
from nbengine.models.families.recurrent_layers import check_activation, layers_with_state, switch

_RECURRENT, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")


class GraniteMoeHybrid(GraniteMoe):
    """Granite 4; its feed-forward block is shared by all tokens, and has experts beside it or not."""

    title = "Granite 4 (hybrid)"

    def shares_experts(self, hf: Mapping[str, Any]) -> bool:
        """See `DecoderFamily.shares_experts`."""
        return hf.get("num_local_experts") != 0

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        shared = positive(hf, "shared_intermediate_size", 1024)
        rope = 0 if hf.get("position_embedding_type") == "rope" else None
        types = hf.get("layer_types", hf.get("layers_block_type"))
        if types is None:
            types = [_RECURRENT[0]] * positive(hf, "num_hidden_layers")
        space = state_space(hf)
        layers = layers_with_state(types, _RECURRENT, _ATTENTION, state_bytes=space.state_bytes, rope=rope)
        check_activation(hf, layers)
        return {
            # Experts or not, the rest is that of Granite.
            **Granite.variant(self, hf),
            "mlp_bias": False,
            "moe": _experts(hf, shared),
            "intermediate_size": shared,
            "layers": layers,
            "mamba2": space if any(layer.attention == "recurrent" for layer in layers) else None,
        }

    def our_name(self, name: str) -> str:
        """Files call the recurrent block mamba."""
        return super().our_name(name).replace(".mamba.", ".linear_attn.", 1)

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`."""
        *_, block, tensor, _kind = ("", "", *name.split("."))
        stacked = _stacked(config).get((block, tensor))
        if stacked is not None:
            parts = stacked_parts(name, shape, stacked)
        elif (block, tensor) == ("shared_mlp", "output_linear"):
            parts = stacked_parts(name, shape, [("down_proj", config.hidden_size)])
        else:
            yield from super().tensor_parts(config, name, shape)
            return
        shared = ".mlp." if config.moe is None else ".mlp.shared_expert."
        for stated, part in parts:
            yield self.our_name(stated).replace(".shared_mlp.", shared, 1), part


def _stacked(config: DecoderConfig) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """Return the projections that each tensor of a block has, with their rows."""
    moe, space = config.moe, config.mamba2
    shared = config.intermediate_size if moe is None else moe.shared_intermediate_size
    found = {("shared_mlp", "input_linear"): [("gate_proj", shared), ("up_proj", shared)]}
    if space is not None:
        found |= {("mamba", name): parts for name, parts in stacked_state_space(space).items()}
    return found


def stacked_state_space(space: Mamba2Config) -> dict[str, list[tuple[str, int]]]:
    """Return the projections that each tensor of a block with a state has, with their rows."""
    grouped = space.groups * space.state_size
    convolved = [("x", space.inner), ("b", grouped), ("c", grouped)]
    projected = [("z", space.inner), *convolved, ("dt", space.heads)]
    return {
        "conv1d": [(f"conv1d_{part}", rows) for part, rows in convolved],
        "in_proj": [(f"in_proj_{part}", rows) for part, rows in projected],
    }


def _experts(hf: Mapping[str, Any], shared: int) -> MoEConfig | None:
    if hf.get("num_local_experts") == 0:
        return None
    return MoEConfig(
        num_experts=num_experts_of(hf, 8),
        experts_per_token=positive(hf, "num_experts_per_tok", 2),
        intermediate_size=positive(hf, "intermediate_size"),
        renormalize=True,
        shared_intermediate_size=shared,
        shared_gate=False,
    )


def state_space(hf: Mapping[str, Any]) -> Mamba2Config:
    """Return the sizes of the layers with a state.

    Raises:
        ModelLoadError: a value is wrong.
    """
    inner = positive(hf, "mamba_expand", 2) * positive(hf, "hidden_size")
    heads = positive(hf, "mamba_n_heads", 128)
    stated = hf.get("mamba_d_head", "auto")
    head_dim = inner // heads if stated in ("auto", None) else positive(hf, "mamba_d_head")
    if heads * head_dim != inner:
        raise ModelLoadError(
            f"config.json: mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) must be mamba_expand times "
            f"hidden_size ({inner})"
        )
    least, most = _limits(hf.get("time_step_limit"))
    return Mamba2Config(
        heads=heads,
        head_dim=head_dim,
        groups=positive(hf, "mamba_n_groups", 1),
        state_size=positive(hf, "mamba_d_state", 256),
        kernel=positive(hf, "mamba_d_conv", 4),
        conv_bias=switch(hf, "mamba_conv_bias", default=True),
        proj_bias=switch(hf, "mamba_proj_bias", default=False),
        least_step=least,
        most_step=most,
    )


def _limits(stated: Any) -> tuple[float, float]:
    """Return the limits of a step; transformers writes what JSON has no number for as {"__float__": "Infinity"}."""
    if stated is None:
        return 0.0, math.inf
    try:
        least, most = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in stated)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"config.json: time_step_limit must be two numbers, got {quoted(stated)}"
        ) from error
    return least, most
