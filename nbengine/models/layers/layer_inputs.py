"""Layers that take numbers of each token beside the residual stream, and scale the stream (Gemma 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.kernels.row_kernels import select_pair_gate
from nbengine.models.configs.decoder_config import ACTIVATIONS, DecoderConfig
from nbengine.models.layers.basic import Linear, RMSNorm
from nbengine.models.layers.decoder_layer import DecoderLayer, FeedForward, ResidualStream
from nbengine.models.layers.mlp import ACTIVATE
from nbengine.models.layers.parallel_layers import VocabParallelEmbedding
from nbengine.models.layers.rotary import RotaryEmbedding
from nbengine.models.layers.weights import Place, Slots, WeightSlot

_EMBEDDING = "model.embed_tokens_per_layer"
_PROJECTION = "model.per_layer_model_projection"
_NORM = "model.per_layer_projection_norm"
_GATE, _OUT, _OUT_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
MEAN_OF_TWO = 2.0**-0.5
"""The factor of two sums of equal variance."""


class LayerInputs:
    """The numbers that each layer takes of each token: an embedding of the token's own, and a projection of the one with
    which the residual stream begins."""

    def __init__(self, config: DecoderConfig, place: Place, parallel: ParallelState) -> None:
        size, hidden = config.layer_inputs, config.hidden_size
        self.num_layers, self.size = config.num_layers, size
        self.scale, self.own_scale = hidden**-0.5, size**0.5
        self.embedding = VocabParallelEmbedding(
            config.layer_input_tokens,
            config.num_layers * size,
            parallel=parallel,
            place=place.inside(_EMBEDDING),
        )
        self.projection = Linear(
            hidden, config.num_layers * size, bias=False, place=place.inside(_PROJECTION)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps, place.inside(_NORM))

    def of(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Return the numbers [T, layers, size] of tokens input_ids [T], with which the stream begins as x [T, hidden]."""
        shape = (-1, self.num_layers, self.size)
        own = self.embedding(input_ids).to(x.dtype).mul_(self.own_scale).view(shape)
        projected = self.norm((self.projection(x) * self.scale).view(shape))
        return (projected + own).mul_(MEAN_OF_TWO)

    def slots(self) -> Slots:
        """Yield the weights under the checkpoint's names."""
        yield from self.embedding.slots(_EMBEDDING)
        yield from self.projection.slots(_PROJECTION)
        yield from self.norm.slots(_NORM)


class InputLayer(DecoderLayer):
    """A layer of which the input of tokens is a third block, if there is one, and which scales the stream behind its
    blocks."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        rotaries: list[RotaryEmbedding],
        mlp: FeedForward | None,
        place: Place,
        parallel: ParallelState,
    ) -> None:
        super().__init__(config, config.layer(index), rotaries, mlp, place, parallel)
        self.index = index
        self.scalar = place.vector(1)
        self.gate: Linear | None = None
        if config.layer_inputs:
            size, hidden = config.layer_inputs, config.hidden_size
            self.activation = ACTIVATIONS[config.hidden_act]
            self.gate = Linear(hidden, size, bias=False, place=place.inside(_GATE))
            self.out = Linear(size, hidden, bias=False, place=place.inside(_OUT))
            self.out_norm = RMSNorm(hidden, config.rms_norm_eps, place.inside(_OUT_NORM))
            self._compiled: Callable[[Tensor, Tensor], Tensor] | None = None
            if not place.is_exact:
                self._compiled = select_pair_gate(place.device, place.hidden_dtype, size, self.activation)

    def __call__(self, stream: ResidualStream, angles: list[Tensor], cache: Any, metadata: Any) -> None:
        """See `DecoderLayer`; the inputs of all layers [T, layers, size] are behind the angles."""
        super().__call__(stream, angles, cache, metadata)
        hidden = stream.read(None)
        if self.gate is not None:
            gated = self._gated(self.gate(hidden), angles[-1][:, self.index])
            hidden.add_(self.out_norm(self.out(gated)))
        hidden.mul_(self.scalar)

    def slots(self, prefix: str) -> Slots:
        """See `DecoderLayer.slots`."""
        yield from super().slots(prefix)
        yield f"{prefix}.layer_scalar", WeightSlot.whole(self.scalar)
        if self.gate is not None:
            yield from self.gate.slots(f"{prefix}.{_GATE}")
            yield from self.out.slots(f"{prefix}.{_OUT}")
            yield from self.out_norm.slots(f"{prefix}.{_OUT_NORM}")

    def _gated(self, gate: Tensor, other: Tensor) -> Tensor:
        return (
            ACTIVATE[self.activation](gate) * other if self._compiled is None else self._compiled(gate, other)
        )
