"""Mixture of experts: a router, and of many feed-forward blocks the few that it prefers for each token.

A layer's experts are divided among all workers of its stage in all engine cores. Each of them computes its part for
the tokens of all: Rajbhandari et al., 2022, DeepSpeed-MoE, with an all-gather and a reduce-scatter between the engine
cores in place of two all-to-alls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.distributed.layout import RankLayout
from nbengine.kernels.dispatch import ExpertKernels
from nbengine.models.layers import Linear, Slots, WeightSlot
from nbengine.models.mlp import DecoderMLP
from nbengine.models.moe_config import MoEConfig
from nbengine.models.sharding import ExpertShard

PROJECTIONS = (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1))
"""An expert's matrices, and along which dimension each has the inner features."""


class Experts:
    """One worker's part of a layer's experts.

    `gate_up` is [experts, 2 * inner, hidden], the rows of the gate before those of the other projection, and `down`
    [experts, hidden, inner], with the experts and inner features of `shard`. `numbers` [all experts], int64, has an
    expert's index in them, and their length for one that is elsewhere; None where none is.
    """

    def __init__(
        self,
        moe: MoEConfig,
        hidden_size: int,
        layout: RankLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shard = shard = ExpertShard.of(moe, layout)
        num_experts, inner = len(shard.experts), len(shard.inner)
        self.gate_up = torch.empty(num_experts, 2 * inner, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(num_experts, hidden_size, inner, dtype=dtype, device=device)
        self.numbers: Tensor | None = None
        if num_experts < moe.num_experts:
            self.numbers = torch.full((moe.num_experts,), num_experts, dtype=torch.int64, device=device)
            self.numbers[shard.experts.start : shard.experts.stop] = torch.arange(num_experts, device=device)
        self._full_inner = moe.intermediate_size

    def slots(self, prefix: str) -> Slots:
        """Each expert's weights, or this worker's part of them, under the checkpoint's names."""
        inner, hidden_size = len(self.shard.inner), self.down.shape[1]
        start, rows = self.shard.inner.start, (self._full_inner, hidden_size)
        for index, expert in enumerate(self.shard.experts):
            gate_up = self.gate_up[index]
            parts = (gate_up[:inner], gate_up[inner:], self.down[index])
            for (projection, dim), part in zip(PROJECTIONS, parts, strict=True):
                shape = rows if dim == 0 else rows[::-1]
                yield f"{prefix}.{expert}.{projection}.weight", WeightSlot(part, shape, dim, start)


class SharedExpert:
    """The block that all tokens go through, weighted by a gate of its own (Qwen2-MoE)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
    ) -> None:
        # Alone with its layout it sums nothing: its share is summed with that of the experts.
        alone = ParallelState(parallel.layout)
        self.mlp = DecoderMLP(
            hidden_size, intermediate_size, bias=False, dtype=dtype, device=device, parallel=alone
        )
        self.gate = Linear(hidden_size, 1, bias=False, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's share of the output [T, hidden] for normalised hidden states x [T, hidden]."""
        return self.mlp(x).mul_(self.gate(x).sigmoid_())

    def slots(self, prefix: str) -> Slots:
        """The weights under the checkpoint's names."""
        yield from self.mlp.slots(f"{prefix}.shared_expert")
        yield from self.gate.slots(f"{prefix}.shared_expert_gate")


class SparseMoeBlock:
    """A layer's router and this worker's part of its experts.

    All workers of the stage call it together, those of an engine core with the same tokens. Where there are several
    engine cores, each with tokens of its own, the workers compute their parts for the tokens of all of them.
    """

    def __init__(
        self,
        moe: MoEConfig,
        hidden_size: int,
        kernels: ExpertKernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
    ) -> None:
        self.moe = moe
        self._kernels = kernels
        self._parallel = parallel
        self.router = Linear(hidden_size, moe.num_experts, bias=False, dtype=dtype, device=device)
        self.experts = Experts(moe, hidden_size, parallel.layout, dtype=dtype, device=device)
        self.shared: SharedExpert | None = None
        if moe.shared_intermediate_size:
            self.shared = SharedExpert(
                hidden_size, moe.shared_intermediate_size, dtype=dtype, device=device, parallel=parallel
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised hidden states x [T, hidden], T may be 0, to the block's output [T, hidden]."""
        dp, tp = self._parallel.dp, self._parallel.tp
        out = self._compute(x) if dp.size == 1 else dp.reduce_scatter(self._compute(dp.gather(x)))
        if not len(x):
            return out
        if self.shared is not None:
            out.add_(self.shared(x))
        return out if tp.size == 1 else tp.all_reduce(out)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of tokens x [T, hidden], [T, experts_per_token] int64, and their weights, float32."""
        probabilities = F.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.moe.experts_per_token, dim=-1)
        if self.moe.renormalize:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def warm_up(self) -> None:
        """Compile what the block needs."""
        part = self.experts
        self._kernels.warm_up(part.gate_up, part.down, self.moe.experts_per_token)

    def redivide(self, parallel: ParallelState) -> dict[str, WeightSlot]:
        """Divide the experts as `parallel` has it, and use its groups from now on; all workers of the stage do so.

        Gives what of its new part this worker did not have, which has to be filled in before the next step, under the
        names of `experts.slots("")`.
        """
        before, layout = self.experts, parallel.layout
        self._parallel = parallel
        if ExpertShard.of(self.moe, layout) == before.shard:
            return {}
        self.experts = Experts(
            self.moe, before.down.shape[1], layout, dtype=before.down.dtype, device=before.down.device
        )
        held = dict(before.slots(""))
        return {
            name: slot
            for name, slot in self.experts.slots("")
            if name not in held or not slot.copy_from(held[name])
        }

    def slots(self, prefix: str) -> Slots:
        """The weights under the checkpoint's names."""
        yield from self.router.slots(f"{prefix}.gate")
        yield from self.experts.slots(f"{prefix}.experts")
        if self.shared is not None:
            yield from self.shared.slots(prefix)

    def _compute(self, x: Tensor) -> Tensor:
        """This worker's part of the experts' output for tokens x [T, hidden]."""
        if not len(x):
            return x.new_empty(x.shape)
        weights, chosen = self.route(x)
        part = self.experts
        if part.numbers is not None:
            chosen = part.numbers[chosen]
        return self._kernels.experts(x, part.gate_up, part.down, weights, chosen)
