"""A mixture of experts: a router, and of many feed-forward blocks the few that it prefers for each token.

A layer's experts are divided among all workers of its stage in all engine cores. Each of them computes its
part for the tokens of all: Rajbhandari et al., 2022, DeepSpeed-MoE, with an all-gather and a reduce-scatter
between the engine cores in place of two all-to-alls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.distributed.layout import RankLayout
from nbengine.kernels.dispatch import ExpertKernels, select_routing, select_sigmoid_scale
from nbengine.models.configs.moe_config import GATED_PROJECTIONS, MoEConfig
from nbengine.models.layers.basic import Linear
from nbengine.models.layers.grouped_router import GroupedRouter
from nbengine.models.layers.mlp import DecoderMLP
from nbengine.models.layers.packed_experts import PackedExperts, expert_format
from nbengine.models.layers.weights import DenseWeight, Place, Slots, WeightSlot
from nbengine.models.sharding import ExpertShard

if TYPE_CHECKING:
    from nbengine.kernels.cpu.routing import CpuRouting
    from nbengine.kernels.cpu.row_calls import CpuSigmoidScale


class DenseExperts:
    """One worker's part of a layer's experts in the model's data type.

    `gate_up` is [experts, 2 * inner, hidden], the rows of the gate before those of the other projection, and
    `down` [experts, hidden, inner], with the experts and inner features of the shard.
    """

    def __init__(
        self, shard: ExpertShard, moe: MoEConfig, hidden_size: int, place: Place, kernels: ExpertKernels
    ) -> None:
        num_experts, inner = len(shard.experts), len(shard.inner)
        self.gate_up = place.empty(num_experts, 2 * inner, hidden_size)
        self.down = place.empty(num_experts, hidden_size, inner)
        self._shard = shard
        self._moe = moe
        self._kernels = kernels

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; see
        `nbengine.kernels.dispatch.ExpertKernels.experts`."""
        rows = x.to(self.down.dtype)
        return self._kernels.experts(rows, self.gate_up, self.down, weights, experts).to(x.dtype)

    def warm_up(self) -> None:
        """Compile what a step needs."""
        self._kernels.warm_up(self.gate_up, self.down, self._moe.experts_per_row)

    def slots(self, prefix: str) -> Slots:
        """Yield each expert's weights, or this worker's part of them, under the checkpoint's names."""
        inner, hidden_size = len(self._shard.inner), self.down.shape[1]
        start, rows = self._shard.inner.start, (self._moe.intermediate_size, hidden_size)
        for index, expert in enumerate(self._shard.experts):
            gate_up = self.gate_up[index]
            parts = (gate_up[:inner], gate_up[inner:], self.down[index])
            for (projection, dim), part in zip(GATED_PROJECTIONS, parts, strict=True):
                shape = rows if dim == 0 else rows[::-1]
                yield f"{prefix}.{expert}.{projection}.weight", WeightSlot(part, shape, dim, start)


class Experts:
    """One worker's part of a layer's experts, `shard`: stacked, or each by itself where some stay quantised or have
    other things than silu and three matrices.

    `numbers` [all experts], int64, has the index of each expert in the part, and the part's length for an
    expert that is elsewhere; it is None where none is.
    """

    def __init__(
        self,
        moe: MoEConfig,
        hidden_size: int,
        layout: RankLayout,
        place: Place,
        kernels: ExpertKernels,
    ) -> None:
        self.shard = shard = ExpertShard.of(moe, layout)
        self.blocks: DenseExperts | PackedExperts
        is_packed = any(
            expert_format(place, expert, projection, hidden_size, shard.inner)
            for expert in shard.experts
            for projection, _ in moe.projections
        )
        if is_packed or moe.bias or moe.activation != "silu":
            self.blocks = PackedExperts(shard, moe, hidden_size, place)
        else:
            self.blocks = DenseExperts(shard, moe, hidden_size, place, kernels)
        self.numbers: Tensor | None = None
        num_experts = len(shard.experts)
        if num_experts < moe.num_experts:
            self.numbers = torch.full((moe.num_experts,), num_experts, dtype=torch.int64, device=place.device)
            self.numbers[shard.experts.start : shard.experts.stop] = torch.arange(
                num_experts, device=place.device
            )

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return this worker's part of the weighted sums for tokens x [T, hidden], whose experts `chosen` and
        their `weights` are [T, experts_per_row]."""
        return self.blocks(x, weights, chosen if self.numbers is None else self.numbers[chosen])

    def slots(self, prefix: str) -> Slots:
        """Yield each expert's weights, or this worker's part of them, under the checkpoint's names."""
        return self.blocks.slots(prefix)


class SharedExpert:
    """The block that all tokens go through, weighted by its own gate (Qwen2-MoE) or as it is (Granite 4, DeepSeek)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        has_gate: bool,
        activation: str,
        place: Place,
        parallel: ParallelState,
    ) -> None:
        # With the layout alone it sums nothing: its share is summed with that of the experts.
        alone = ParallelState(parallel.layout)
        own = place.inside("shared_expert")
        self.mlp = DecoderMLP(
            hidden_size, intermediate_size, bias=False, place=own, parallel=alone, activation=activation
        )
        self.gate: Linear | None = None
        self._scoring: CpuRouting | None = None
        self._scale: CpuSigmoidScale | None = None
        if has_gate:
            self.gate = Linear(hidden_size, 1, bias=False, place=place.inside("shared_expert_gate"))
            if place.is_wide:
                self._scoring = select_routing(place.device, hidden_size, 1, 1, renormalize=False)
                self._scale = select_sigmoid_scale(place.device, hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's share of the output [T, hidden] for normalised hidden states x [T, hidden]."""
        out, gate = self.mlp(x), self.gate
        if gate is None:
            return out
        weight = gate.weight
        if self._scoring is None or self._scale is None or not isinstance(weight, DenseWeight):
            return out.mul_(gate(x).sigmoid_())
        return self._scale(out, self._scoring.scores(x, weight.tensor))

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""
        yield from self.mlp.slots(f"{prefix}.shared_expert")
        if self.gate is not None:
            yield from self.gate.slots(f"{prefix}.shared_expert_gate")


class SparseMoeBlock:
    """A layer's router and this worker's part of its experts.

    All workers of the stage call it together, those of an engine core with the same tokens. Where there are
    several engine cores, each with its own tokens, the workers compute their parts for the tokens of all of
    them.
    """

    def __init__(
        self,
        moe: MoEConfig,
        hidden_size: int,
        kernels: ExpertKernels,
        *,
        place: Place,
        parallel: ParallelState,
    ) -> None:
        self.moe = moe
        self.hidden_size = hidden_size
        self._kernels = kernels
        self._parallel = parallel
        # A change of the number of engine cores gives up the experts, and nothing else.
        apart = place.apart().inside("experts")
        self.experts_place = apart.without_memory()
        router_place = place.inside("gate")
        self.router: Linear | GroupedRouter
        if moe.routing is None:
            self.router = Linear(hidden_size, moe.num_experts, bias=moe.bias, place=router_place)
        else:
            self.router = GroupedRouter(moe, moe.routing, hidden_size, router_place)
        self.experts = Experts(moe, hidden_size, parallel.layout, apart, kernels)
        self.routing: CpuRouting | None = None
        """The compiled choice of experts, on a CPU whose products round: the same on all ranks."""
        if place.is_wide:
            self.routing = self._compiled(place.device)
        self.shared: SharedExpert | None = None
        if moe.shared_intermediate_size:
            size = moe.shared_intermediate_size
            self.shared = SharedExpert(
                hidden_size,
                size,
                has_gate=moe.shared_gate,
                activation=moe.hidden_act,
                place=place,
                parallel=parallel,
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Turn normalised hidden states x [T, hidden], T may be 0, into the block's output [T, hidden]."""
        dp, tp = self._parallel.dp, self._parallel.tp
        out = self._compute(x) if dp.size == 1 else dp.reduce_scatter(self._compute(dp.gather(x)))
        if not len(x):
            return out
        if self.shared is not None:
            out.add_(self.shared(x))
        return out if tp.size == 1 else tp.all_reduce(out)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens x [T, hidden], [T, experts_per_token] int64, and their weights,
        float32."""
        if self.routing is not None:
            return self.routing.choose(self.logits(x))
        if isinstance(self.router, GroupedRouter):
            return self.router.choose(x)
        probabilities = F.softmax(self.logits(x), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.moe.experts_per_token, dim=-1)
        if self.moe.renormalize:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of all experts for tokens x [T, hidden], the first ones of each row; there may be more."""
        weight, bias = self.router.weight, self.router.bias
        if self.routing is None or not isinstance(weight, DenseWeight):
            return self.router(x)
        scores = self.routing.scores(x, weight.tensor)
        if bias is not None:
            scores[:, : len(bias)] += bias
        return scores

    def rows(self, x: Tensor) -> Tensor:
        """Return what experts take of the block's input x [T, hidden]."""
        return x

    @property
    def is_alone(self) -> bool:
        """Return whether the experts compute this engine core's tokens alone."""
        return self._parallel.dp.size == 1

    @property
    def is_recordable(self) -> bool:
        """Return whether the host never learns which experts were chosen."""
        return isinstance(self.experts.blocks, DenseExperts) and self._kernels.name == "triton"

    def are_alike(self) -> bool:
        """Return whether all experts, those of other ranks too, are quantised in the same formats, gate and other
        projection in one."""
        moe, inner, place = self.moe, self.experts.shard.inner, self.experts_place
        forms = {
            tuple(expert_format(place, expert, name, self.hidden_size, inner) for name, _ in moe.projections)
            for expert in range(moe.num_experts)
        }
        *first, down = next(iter(forms))
        return len(forms) == 1 and len(set(first)) == 1 and None not in (*first, down)

    def warm_up(self) -> None:
        """Compile the kernels that dense experts need; those of quantised weights are the whole model's."""
        if isinstance(self.experts.blocks, DenseExperts):
            self.experts.blocks.warm_up()

    def redivide(self, parallel: ParallelState) -> dict[str, WeightSlot]:
        """Divide the experts as `parallel` has it, and use its groups from now on; all workers of the stage
        do this.

        Return the slots of the new part that this worker did not have, which have to be filled in before the
        next step, under the names of `experts.slots("")`.
        """
        before, layout = self.experts, parallel.layout
        self._parallel = parallel
        if ExpertShard.of(self.moe, layout) == before.shard:
            return {}
        self.experts = Experts(self.moe, self.hidden_size, layout, self.experts_place, self._kernels)
        held = dict(before.slots(""))
        return {
            name: slot
            for name, slot in self.experts.slots("")
            if name not in held or not slot.copy_from(held[name])
        }

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""
        yield from self.router.slots(f"{prefix}.gate")
        yield from self.experts.slots(f"{prefix}.experts")
        if self.shared is not None:
            yield from self.shared.slots(prefix)

    def _compiled(self, device: torch.device) -> CpuRouting | None:
        if isinstance(self.router, GroupedRouter):
            return self.router.compiled(device, self.hidden_size)
        moe = self.moe
        sizes = self.hidden_size, moe.num_experts, moe.experts_per_token
        return select_routing(device, *sizes, renormalize=moe.renormalize)

    def _compute(self, x: Tensor) -> Tensor:
        """Return this worker's part of the experts' output for tokens x [T, hidden]."""
        if not len(x):
            return x.new_empty(x.shape)
        weights, chosen = self.route(x)
        rows = self.rows(x)
        return (
            self._of_weighted(rows, weights, chosen)
            if self.moe.weighs_inputs
            else self.experts(rows, weights, chosen)
        )

    def _of_weighted(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the sums of what each expert makes of its own multiple of a token's row."""
        rows = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        out = self.experts(rows, torch.ones_like(weights).view(-1, 1), chosen.view(-1, 1))
        # One after the other, so that a token's sum does not depend on the number of tokens.
        first, *others = out.view(*chosen.shape, -1).unbind(1)
        return sum(others, start=first)
