"""A layer with a recurrent state: the state space of Mamba-2 (Dao and Gu, 2024) behind a short convolution, as in
Granite 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.kernels.row_kernels import select_group_norm, select_pair_gate, select_softplus
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.recurrent_config import Mamba2Config
from nbengine.models.layers.basic import MergedLinear, Rows
from nbengine.models.layers.gated_delta_net import RecurrentState
from nbengine.models.layers.parallel_layers import row_parallel_linear
from nbengine.models.layers.weights import Place, Slots, WeightSlot

if TYPE_CHECKING:
    from nbengine.kernels.recurrent_metadata import RecurrentMetadata


class Mamba2Mixer:
    """The projections, convolution, state space and gated norm of one layer, for the heads of this rank and their
    groups; ranks that share a group all have its b and c."""

    def __init__(self, config: DecoderConfig, place: Place, parallel: ParallelState) -> None:
        space, layout = config.mamba2, parallel.layout
        assert space is not None
        self.space = space
        self._rank = layout.tp_rank
        self.heads = space.heads // layout.tp_size
        self.groups = max(1, space.groups // layout.tp_size)
        self.inner, grouped = self.heads * space.head_dim, self.groups * space.state_size
        self._device, self._hidden_dtype = place.device, place.hidden_dtype
        first_group = layout.tp_rank * space.groups // layout.tp_size
        shared = (grouped, space.groups * space.state_size, first_group * space.state_size)
        own = (self.inner, space.inner, layout.tp_rank * self.inner)
        self._convolved = (("x", *own), ("b", *shared), ("c", *shared))
        steps = Rows("in_proj_dt", self.heads, space.heads, layout.tp_rank * self.heads)
        self.in_proj = MergedLinear(
            config.hidden_size,
            [
                *(Rows(f"in_proj_{name}", *rows) for name, *rows in self._convolved),
                Rows("in_proj_z", *own),
                steps,
            ],
            bias=space.proj_bias,
            place=place,
        )
        self.sizes = (self.inner, grouped, grouped)
        channels = sum(self.sizes)
        self.split = (channels, self.inner, self.heads)
        self.conv_weight = place.vector(channels * space.kernel).view(channels, space.kernel)
        self.conv_bias = place.vector(channels) if space.conv_bias else None
        self.a_log, self.dt_bias, self.d = (place.wide_vector(self.heads) for _ in range(3))
        self._softplus = None
        if not place.is_exact:
            self._softplus = select_softplus(place.device, place.hidden_dtype, self.heads)
        self.norm = GatedGroupNorm(space, config.rms_norm_eps, first_group, place, parallel)
        self.out_proj = row_parallel_linear(
            space.inner,
            config.hidden_size,
            parallel=parallel,
            bias=space.proj_bias,
            place=place.inside("out_proj"),
        )

    def __call__(
        self, x: Tensor, angles: list[Tensor], states: RecurrentState, metadata: RecurrentMetadata
    ) -> Tensor:
        """Turn normalised hidden states x [T, hidden] into the block's output [T, hidden]; there are no positions,
        and `angles` are not used."""
        del angles
        out, gate = self._mix(self.in_proj(x), states, metadata)
        return self.out_proj(self.norm(out, gate))

    def warm_up(self, metadata: RecurrentMetadata) -> None:
        """Compute the tokens of a step, which are zeros, between the projections."""
        x = torch.zeros(metadata.num_tokens, sum(self.split), dtype=self._hidden_dtype, device=self._device)
        self._mix(x, self.new_state(metadata.num_slots), metadata)

    def _mix(
        self, projected: Tensor, states: RecurrentState, metadata: RecurrentMetadata
    ) -> tuple[Tensor, Tensor]:
        """Return what comes out of the state space, and its gates."""
        space, kernels = self.space, metadata.kernels
        inputs, gate, step = projected.split_with_sizes(self.split, dim=1)
        mixed = kernels.short_convolution(
            inputs, self.conv_weight, self.conv_bias, states.conv, metadata, silu=True
        )
        inner, b, c = mixed.split_with_sizes(self.sizes, dim=1)
        out = kernels.state_space(
            inner.view(-1, self.heads, space.head_dim),
            self._steps(step).clamp_(space.least_step, space.most_step),
            b.view(-1, self.groups, space.state_size),
            c.view(-1, self.groups, space.state_size),
            self.rate,
            self.d,
            states.state,
            metadata,
        )
        return out.flatten(1), gate

    @property
    def rate(self) -> Tensor:
        """Return the rates [heads] with which states decay, which are negative."""
        return -self.a_log.exp()

    def _steps(self, x: Tensor) -> Tensor:
        if self._softplus is not None:
            return self._softplus(x, self.dt_bias)
        return F.softplus(x.float() + self.dt_bias)

    def new_state(self, num_slots: int) -> RecurrentState:
        """Return the memory of `num_slots` states."""
        space = self.space
        conv = (num_slots, sum(self.sizes), space.kernel - 1)
        state = (num_slots, self.heads, space.state_size, space.head_dim)
        return RecurrentState(
            torch.zeros(conv, dtype=self._hidden_dtype, device=self._device),
            torch.zeros(state, dtype=torch.float32, device=self._device),
        )

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the names that `nbengine.models.families.granite_hybrid` gives the checkpoint's."""
        yield from self.in_proj.slots(prefix)
        first = 0
        for name, size, full_size, start in self._convolved:
            shape = (full_size, 1, self.space.kernel)
            weight = self.conv_weight[first : first + size, None]
            yield f"{prefix}.conv1d_{name}.weight", WeightSlot(weight, shape, 0, start)
            if self.conv_bias is not None:
                bias = self.conv_bias[first : first + size]
                yield f"{prefix}.conv1d_{name}.bias", WeightSlot(bias, (full_size,), 0, start)
            first += size
        for name, vector in (("A_log", self.a_log), ("dt_bias", self.dt_bias), ("D", self.d)):
            yield f"{prefix}.{name}", WeightSlot(vector, (self.space.heads,), 0, self._rank * self.heads)
        yield from self.norm.slots(f"{prefix}.norm")
        yield from self.out_proj.slots(f"{prefix}.out_proj")


class GatedGroupNorm:
    """Root mean square normalisation over each group's part of what came out of a state space, multiplied before by
    silu of a gate.

    Ranks that have parts of one group add up the squares.
    """

    def __init__(
        self,
        space: Mamba2Config,
        eps: float,
        first_group: int,
        place: Place,
        parallel: ParallelState,
    ) -> None:
        ranks = parallel.layout.tp_size
        size = space.inner // ranks
        self.weight = place.vector(size)
        self.eps = eps
        self._slot = WeightSlot(self.weight, (space.inner,), 0, parallel.layout.tp_rank * size)
        self.groups = max(1, space.groups // ranks)
        self._group_size = space.inner // space.groups
        self._first_group, self._all_groups = first_group, space.groups
        self._all_reduce = parallel.tp.all_reduce if space.groups % ranks else None
        self._gate = self._norm = None
        # Of 16 bits the outcome is rounded once, at the end.
        if not (place.is_exact or self.is_shared) and place.hidden_dtype is torch.float32:
            self._gate = select_pair_gate(place.device, place.hidden_dtype, size, "silu")
            self._norm = select_group_norm(self.weight, self.groups, eps, place.hidden_dtype)

    @property
    def is_shared(self) -> bool:
        """Tell whether other ranks have parts of this one's group."""
        return self._all_reduce is not None

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise x [T, own channels] with the gate of the same shape."""
        if self._gate is not None and self._norm is not None:
            return self._norm(self._gate(gate, x))
        gated = x.float() * F.silu(gate.float())
        by_group = gated.view(len(x), self.groups, -1)
        squares = by_group.square().sum(-1)
        if self._all_reduce is not None:
            everyones = squares.new_zeros(len(x), self._all_groups)
            own = slice(self._first_group, self._first_group + 1)
            everyones[:, own] = squares
            squares = self._all_reduce(everyones)[:, own]
        factor = torch.rsqrt(squares / self._group_size + self.eps)
        return (by_group * factor[:, :, None]).flatten(1).mul_(self.weight).to(x.dtype)

    def slots(self, prefix: str) -> Slots:
        """Yield this rank's part of the weight under the checkpoint's name."""
        yield f"{prefix}.weight", self._slot
