"""A dense block and experts side by side, each between norms of its own (Gemma 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.kernels.dispatch import ExpertKernels, select_routing
from nbengine.models.configs.decoder_config import ACTIVATIONS, DecoderConfig
from nbengine.models.configs.moe_config import NORMS_BESIDE, MoEConfig
from nbengine.models.layers.basic import RMSNorm
from nbengine.models.layers.mlp import DecoderMLP
from nbengine.models.layers.moe import SparseMoeBlock
from nbengine.models.layers.weights import Place, Slots, WeightSlot

if TYPE_CHECKING:
    from nbengine.kernels.cpu.routing import CpuRouting

_BEFORE, _AFTER, _BEFORE_EXPERTS, _AFTER_EXPERTS = NORMS_BESIDE


class ScaledMoeBlock(SparseMoeBlock):
    """A layer's experts and their router, each of which normalises the block's input by itself.

    The router's logits are divided by the root of the hidden size, and the weight of each chosen expert is multiplied
    by a factor of the expert's own.
    """

    def __init__(
        self,
        moe: MoEConfig,
        config: DecoderConfig,
        kernels: ExpertKernels,
        *,
        place: Place,
        parallel: ParallelState,
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.router_norm = RMSNorm(hidden, eps, place)
        self.norm = RMSNorm(hidden, eps, place)
        self.factors = place.wide_vector(moe.num_experts)
        self.logit_factor = hidden**-0.5
        super().__init__(moe, hidden, kernels, place=place, parallel=parallel)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `SparseMoeBlock.route`."""
        weights, chosen = super().route(x)
        # The compiled choice multiplies by itself.
        return (weights if self.routing is not None else weights * self.factors[chosen]), chosen

    def logits(self, x: Tensor) -> Tensor:
        """See `SparseMoeBlock.logits`."""
        return super().logits(self.router_norm(x)).mul_(self.logit_factor)

    def rows(self, x: Tensor) -> Tensor:
        """See `SparseMoeBlock.rows`."""
        return self.norm(x)

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the names of the model."""
        yield from super().slots(prefix)
        yield from self.router_norm.slots(f"{prefix}.router_norm")
        yield from self.norm.slots(f"{prefix}.{_BEFORE_EXPERTS}")
        yield f"{prefix}.expert_factors", WeightSlot.whole(self.factors)

    def _compiled(self, device: torch.device) -> CpuRouting | None:
        moe = self.moe
        sizes = self.hidden_size, moe.num_experts, moe.experts_per_token
        return select_routing(device, *sizes, renormalize=moe.renormalize, factors=self.factors)


class DenseAndExperts:
    """A feed-forward block of two, a dense one and experts, that take the same hidden states, not normalised, and whose
    outputs, normalised, are added."""

    def __init__(
        self,
        config: DecoderConfig,
        moe: MoEConfig,
        kernels: ExpertKernels,
        *,
        place: Place,
        parallel: ParallelState,
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm, self.after = RMSNorm(hidden, eps, place), RMSNorm(hidden, eps, place)
        self.mlp = DecoderMLP(
            hidden,
            config.intermediate_size,
            bias=config.mlp_bias,
            place=place,
            parallel=parallel,
            activation=ACTIVATIONS[config.hidden_act],
        )
        self.experts = ScaledMoeBlock(moe, config, kernels, place=place, parallel=parallel)
        self.after_experts = RMSNorm(hidden, eps, place)

    def __call__(self, x: Tensor) -> Tensor:
        """Turn hidden states x [T, hidden] into the block's output [T, hidden]."""
        dense = self.after(self.mlp(self.norm(x)))
        return dense.add_(self.after_experts(self.experts(x)))

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the names of the model."""
        yield from self.mlp.slots(prefix)
        yield from self.norm.slots(f"{prefix}.{_BEFORE}")
        yield from self.after.slots(f"{prefix}.{_AFTER}")
        yield from self.after_experts.slots(f"{prefix}.{_AFTER_EXPERTS}")
        yield from self.experts.slots(prefix)
