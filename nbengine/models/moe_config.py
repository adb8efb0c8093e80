"""What a Hugging Face configuration says of a decoder's mixture of experts; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.hf_config import positive

ARCHITECTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
CLASSIFIERS = {name.replace("CausalLM", "SequenceClassification"): name for name in ARCHITECTURES}
"""Those with a classification head, and the class whose decoder they have."""


@dataclass(frozen=True)
class MoEConfig:
    """A decoder's mixture of experts.

    Of `num_experts` feed-forward blocks with `intermediate_size` inner features every token is computed by the
    `experts_per_token` that its router prefers, weighted by the router's probabilities, which with `renormalize` are
    divided by their sum. `shared_intermediate_size` is that of the block that all tokens go through as well, 0 without
    one. Every `sparse_step`th layer has experts, but for the `dense_layers`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalize: bool
    shared_intermediate_size: int = 0
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ModelLoadError(
                f"num_experts_per_tok ({self.experts_per_token}) must be at most the number of experts "
                f"({self.num_experts})"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether the decoder's layer of this index has experts in place of one feed-forward block."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


def is_moe(hf: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face configuration is that of a supported mixture-of-experts model."""
    names = hf.get("architectures") or ()
    return any(name in ARCHITECTURES or name in CLASSIFIERS for name in names)


def moe_config(architecture: str, hf: Mapping[str, Any]) -> MoEConfig | None:
    """The experts of a decoder of the class `architecture`, None for a dense one.

    Raises:
        ModelLoadError: a value is missing or wrong.
    """
    match architecture:
        case "MixtralForCausalLM":
            return MoEConfig(
                num_experts=_num_experts(hf, 8),
                experts_per_token=positive(hf, "num_experts_per_tok", 2),
                intermediate_size=positive(hf, "intermediate_size"),
                renormalize=True,
            )
        case "Qwen2MoeForCausalLM":
            return _qwen(
                hf, _num_experts(hf, 60), 4, 1408, positive(hf, "shared_expert_intermediate_size", 5632)
            )
        case "Qwen3MoeForCausalLM":
            return _qwen(hf, _num_experts(hf, 128), 8, 768, 0)
        case _:
            return None


def _qwen(hf: Mapping[str, Any], num_experts: int, per_token: int, inner: int, shared: int) -> MoEConfig:
    """`per_token` and `inner` are what transformers assumes where config.json says nothing."""
    return MoEConfig(
        num_experts=num_experts,
        experts_per_token=positive(hf, "num_experts_per_tok", per_token),
        intermediate_size=positive(hf, "moe_intermediate_size", inner),
        renormalize=bool(hf.get("norm_topk_prob", False)),
        shared_intermediate_size=shared,
        sparse_step=positive(hf, "decoder_sparse_step", 1),
        dense_layers=_layers(hf.get("mlp_only_layers") or []),
    )


def _num_experts(hf: Mapping[str, Any], default: int) -> int:
    """Older files of Qwen's models, and all of Mixtral's, have another name for it than transformers 5 writes."""
    key = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    return positive(hf, key, default)


def _layers(stated: object) -> tuple[int, ...]:
    if not isinstance(stated, list) or not all(isinstance(layer, int) for layer in stated):
        raise ModelLoadError(f"config.json: mlp_only_layers must be a list of integers, got {stated!r}")
    return tuple(stated)
