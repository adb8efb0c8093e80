"""The part of a Hugging Face configuration that concerns a decoder's mixture of experts; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nbengine.errors import ModelLoadError
from nbengine.models.configs.hf_config import positive

GATED_PROJECTIONS = (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1))
NORMS_BESIDE = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
"""The norms before and behind a dense block, and before and behind the experts beside it."""


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """The way in which DeepSeek's models, and others, choose experts, in float32.

    An expert's score is the `score` of its logit, all of them together ("softmax") or each alone ("sigmoid"). The
    experts are divided into `groups`, and only those of the best `chosen_groups` are chosen. A group is as good as
    its best expert; with `has_correction`, as its best two together, each expert's score with a number added that
    does nothing but choose. The weights of the chosen are multiplied by `scale`.
    """

    score: Literal["softmax", "sigmoid"]
    groups: int = 1
    chosen_groups: int = 1
    has_correction: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The gate of gpt-oss's experts, in place of silu.

    The gate is cut above `limit`, the other projection on both sides. The gate is multiplied by the sigmoid of `alpha`
    times itself, and by the other projection raised by 1.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoEConfig:
    """A decoder's mixture of experts.

    Of `num_experts` feed-forward blocks with `intermediate_size` inner features, the `experts_per_token` that
    the router prefers compute a token. They are weighted by the router's probabilities, which with
    `renormalize` are divided by their sum. `shared_intermediate_size` is that of the block that all tokens go
    through as well, 0 without one; with `shared_gate` a gate of its own weights it. Every `sparse_step`th layer has experts, but for the `dense_layers`.
    `routing` is how experts are chosen where the greatest logits do not do it. `bias` is for the router and
    all projections of experts; gates act by `hidden_act`, or as `clamped` says. With `weighs_inputs` an expert's input
    is multiplied by its weight, and its output is not (Llama 4). With `beside_dense` the experts are beside the
    decoder's dense block, both have norms of their own, and so has the router, which has a factor of each expert's
    weight, too (Gemma 4). Experts that are not `gated` have no gate beside the other projection (Nemotron-H).
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalize: bool
    shared_intermediate_size: int = 0
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    shared_gate: bool = True
    routing: GroupedRouting | None = None
    bias: bool = False
    clamped: ClampedGate | None = None
    weighs_inputs: bool = False
    hidden_act: str = "silu"
    beside_dense: bool = False
    gated: bool = True

    @property
    def projections(self) -> tuple[tuple[str, int], ...]:
        """Return an expert's matrices, and the dimension along which each has the inner features."""
        return GATED_PROJECTIONS if self.gated else GATED_PROJECTIONS[1:]

    @property
    def activation(self) -> str | tuple[float, float]:
        """Return the activation of experts: a name, or alpha and limit of a clamped gate."""
        return self.hidden_act if self.clamped is None else (self.clamped.alpha, self.clamped.limit)

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ModelLoadError(
                f"num_experts_per_tok ({self.experts_per_token}) must be at most the number of experts "
                f"({self.num_experts})"
            )
        if self.routing is not None:
            self._check_groups(self.routing)

    def _check_groups(self, routing: GroupedRouting) -> None:
        groups, chosen = routing.groups, routing.chosen_groups
        if self.num_experts % groups or chosen > groups:
            raise ModelLoadError(
                f"n_group ({groups}) must divide the number of experts ({self.num_experts}), and topk_group ({chosen}) be "
                "at most n_group"
            )
        reachable = self.num_experts // groups * chosen
        if self.experts_per_token > reachable:
            raise ModelLoadError(
                f"num_experts_per_tok ({self.experts_per_token}) must be at most the number of experts in topk_group "
                f"groups ({reachable})"
            )

    @property
    def experts_per_row(self) -> int:
        """Return how many experts compute a row of their input, which is of one expert alone where weights multiply
        it."""
        return 1 if self.weighs_inputs else self.experts_per_token

    def has_experts(self, layer: int) -> bool:
        """Return whether the decoder's layer of this index has experts in place of one feed-forward block."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


def num_experts_of(hf: Mapping[str, Any], default: int) -> int:
    """Return the number of experts, for which older files of Qwen's models, and all of Mixtral's, have
    another name than transformers 5 writes.

    Raises:
        ModelLoadError: it is no positive integer.
    """
    key = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    return positive(hf, key, default)
