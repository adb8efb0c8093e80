"""A layer with a recurrent state: the gated delta rule (Yang, Kautz and Hatamizadeh, 2025) behind a short
convolution, as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.kernels.row_kernels import select_delta_gates, select_pair_gate, select_rms_norm
from nbengine.models.configs.decoder_config import DecoderConfig, DeltaRuleConfig
from nbengine.models.layers.basic import MergedLinear, Rows
from nbengine.models.layers.parallel_layers import row_parallel_linear
from nbengine.models.layers.weights import ALL_DENSE, Place, Slots, WeightSlot

if TYPE_CHECKING:
    from nbengine.kernels.recurrent_metadata import RecurrentMetadata

CONVOLVED = ("q", "k", "v")
"""The rows that go through the convolution."""


@dataclass(frozen=True)
class RecurrentState:
    """The memory of a layer's states: `conv` [slots, channels, kernel - 1], the last inputs of the convolution, of
    the hidden states' type, and `state` [slots, value heads, key_dim, value_dim] float32."""

    conv: Tensor
    state: Tensor


class GatedDeltaNet:
    """The projections, convolution, delta rule and gated norm of one layer, for the heads of this rank."""

    def __init__(self, config: DecoderConfig, place: Place, parallel: ParallelState) -> None:
        rule, layout = config.delta_rule, parallel.layout
        assert rule is not None
        self.rule = rule
        self._rank, self._ranks = layout.tp_rank, layout.tp_size
        self.key_heads, self.heads = rule.key_heads // self._ranks, rule.value_heads // self._ranks
        self.inner = self.heads * rule.value_dim
        self._device, self._hidden_dtype = place.device, place.hidden_dtype
        self.in_proj = MergedLinear(config.hidden_size, list(self._projections()), bias=False, place=place)
        self.sizes = [self._own(part) for part in CONVOLVED]
        channels = sum(self.sizes)
        self.split = (channels, self._own("z"), self.heads, self.heads)
        self.conv_weight = place.vector(channels * rule.kernel).view(channels, rule.kernel)
        self.gate_weights = place.wide_vector(2 * self.heads).view(2, self.heads)
        """The biases of the decays' steps, and the logarithms of their rates."""
        self.dt_bias, self.a_log = self.gate_weights
        self.norm_weight = place.vector(rule.value_dim)
        self.eps = config.rms_norm_eps
        self._gates = self._norm = self._gate = None
        if not place.is_exact and self._hidden_dtype is torch.float32:
            self._gates = select_delta_gates(place.device, self._hidden_dtype, self.heads)
            self._norm = select_rms_norm(self.norm_weight, self.eps, self._hidden_dtype)
            self._gate = select_pair_gate(place.device, self._hidden_dtype, self.inner, "silu")
        self.out_proj = row_parallel_linear(
            rule.value_heads * rule.value_dim,
            config.hidden_size,
            parallel=parallel,
            bias=False,
            place=self._out_place(place.inside("out_proj")),
        )

    def __call__(
        self, x: Tensor, angles: list[Tensor], states: RecurrentState, metadata: RecurrentMetadata
    ) -> Tensor:
        """Turn normalised hidden states x [T, hidden] into the block's output [T, hidden]; there are no positions,
        and `angles` are not used."""
        del angles
        return self.out_proj(self._mix(self.in_proj(x), states, metadata))

    def warm_up(self, metadata: RecurrentMetadata) -> None:
        """Compute the tokens of a step, which are zeros, between the projections."""
        x = torch.zeros(metadata.num_tokens, sum(self.split), dtype=self._hidden_dtype, device=self._device)
        self._mix(x, self.new_state(metadata.num_slots), metadata)

    def _mix(self, projected: Tensor, states: RecurrentState, metadata: RecurrentMetadata) -> Tensor:
        rule, kernels = self.rule, metadata.kernels
        inputs, gate, beta, step = projected.split_with_sizes(self.split, dim=1)
        mixed = kernels.short_convolution(inputs, self.conv_weight, None, states.conv, metadata, silu=True)
        query, key, value = mixed.split_with_sizes(self.sizes, dim=1)
        if self._gates is not None:
            decay, beta = self._gates(step, beta, self.gate_weights)
        else:
            decay = F.softplus(step.float() + self.dt_bias).mul_(-self.a_log.exp())
            beta = beta.float().sigmoid()
        out = kernels.gated_delta_rule(
            query.view(-1, self.key_heads, rule.key_dim),
            key.view(-1, self.key_heads, rule.key_dim),
            value.view(-1, self.heads, rule.value_dim),
            decay,
            beta,
            states.state,
            metadata,
        )
        if self._norm is not None and self._gate is not None:
            gated = self._gate(gate, self._norm(out).flatten(1))
        else:
            normed = F.rms_norm(out.float(), (rule.value_dim,), self.norm_weight.float(), self.eps)
            gated = normed.flatten(1).mul_(F.silu(gate.float())).to(projected.dtype)
        if self.is_reordered:
            by_key_head = gated.view(-1, self.key_heads, rule.group, rule.value_dim)
            gated = by_key_head.transpose(1, 2).flatten(1)
        return gated

    @property
    def is_reordered(self) -> bool:
        """Tell whether the output projection takes heads in another order than the one in which they are computed."""
        return self.rule.tiled and self.rule.group > 1

    def new_state(self, num_slots: int) -> RecurrentState:
        """Return the memory of `num_slots` states."""
        rule = self.rule
        conv = (num_slots, sum(self.sizes), rule.kernel - 1)
        state = (num_slots, self.heads, rule.key_dim, rule.value_dim)
        return RecurrentState(
            torch.zeros(conv, dtype=self._hidden_dtype, device=self._device),
            torch.zeros(state, dtype=torch.float32, device=self._device),
        )

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the names that `nbengine.models.families.qwen_hybrid` gives the checkpoint's."""
        yield from self.in_proj.slots(prefix)
        first = 0
        for part, size in zip(CONVOLVED, self.sizes, strict=True):
            shape = (size * self._ranks, 1, self.rule.kernel)
            own = self.conv_weight[first : first + size, None]
            yield f"{prefix}.conv1d_{part}.weight", WeightSlot(own, shape, 0, self._rank * size)
            first += size
        for name, vector in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            yield (
                f"{prefix}.{name}",
                WeightSlot(vector, (self.rule.value_heads,), 0, self._rank * self.heads),
            )
        yield f"{prefix}.norm.weight", WeightSlot.whole(self.norm_weight)
        yield from self.out_proj.slots(f"{prefix}.out_proj")

    def _out_place(self, place: Place) -> Place:
        """Return the place of the output projection: where this rank's columns lie apart in the checkpoint and are no
        whole blocks there, they are dense."""
        rule, form = self.rule, place.format(self.inner)
        is_cut = form is not None and self.key_heads * rule.value_dim % form.columns
        return replace(place, packed=ALL_DENSE) if rule.tiled and self._ranks > 1 and is_cut else place

    def _own(self, part: str) -> int:
        """Return the rows of a projection that this rank has."""
        return head_rows(self.rule)[part] * self.key_heads

    def _projections(self) -> Iterator[Rows]:
        """Yield the rows of each projection that this rank has, in the order in which they are used; where the
        checkpoint has them by key heads, each head's rows have a name of their own."""
        for part, rows in head_rows(self.rule).items():
            if self.rule.by_head:
                first = self._rank * self.key_heads
                for head in range(first, first + self.key_heads):
                    yield Rows(f"in_proj_{part}.{head}", rows, rows)
            else:
                own = rows * self.key_heads
                yield Rows(f"in_proj_{part}", own, own * self._ranks, self._rank * own)


def head_rows(rule: DeltaRuleConfig) -> dict[str, int]:
    """Return the rows that each projection has for a key head and its value heads: queries, keys, values, the gate,
    beta, and the step of the decay."""
    values = rule.group * rule.value_dim
    return {"q": rule.key_dim, "k": rule.key_dim, "v": values, "z": values, "b": rule.group, "a": rule.group}
