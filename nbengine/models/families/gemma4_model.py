"""Gemma 4's decoder: a layer takes numbers of each token beside the residual stream, and scales the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.models.configs.decoder_config import ACTIVATIONS, DecoderConfig
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.basic import Linear, RMSNorm
from nbengine.models.layers.decoder_layer import DecoderLayer, FeedForward, ResidualStream
from nbengine.models.layers.mlp import ACTIVATE
from nbengine.models.layers.parallel_layers import VocabParallelEmbedding
from nbengine.models.layers.rotary import RotaryEmbedding
from nbengine.models.layers.weights import ALL_DENSE, Place, Slots, WeightSlot

if TYPE_CHECKING:
    from nbengine.models.causal_model import DecoderOptions

_EMBEDDING = "model.embed_tokens_per_layer"
_PROJECTION = "model.per_layer_model_projection"
_NORM = "model.per_layer_projection_norm"
_GATE, _OUT, _OUT_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
_MEAN_OF_TWO = 2.0**-0.5
"""The factor of two sums of equal variance."""


class LayerInputs:
    """The numbers that each layer takes of each token: an embedding of the token's own, and a projection of the one with
    which the residual stream begins."""

    def __init__(self, config: DecoderConfig, place: Place, parallel: ParallelState) -> None:
        size, hidden = config.layer_inputs, config.hidden_size
        self._shape = (-1, config.num_layers, size)
        self._scale, self._own_scale = hidden**-0.5, size**0.5
        self._embedding = VocabParallelEmbedding(
            config.layer_input_tokens,
            config.num_layers * size,
            parallel=parallel,
            place=place.inside(_EMBEDDING),
        )
        self._projection = Linear(
            hidden, config.num_layers * size, bias=False, place=place.inside(_PROJECTION)
        )
        self._norm = RMSNorm(size, config.rms_norm_eps, place.inside(_NORM))

    def of(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Return the numbers [T, layers, size] of tokens input_ids [T], with which the stream begins as x [T, hidden]."""
        own = self._embedding(input_ids).to(x.dtype).mul_(self._own_scale).view(self._shape)
        projected = self._norm((self._projection(x) * self._scale).view(self._shape))
        return (projected + own).mul_(_MEAN_OF_TWO)

    def slots(self) -> Slots:
        """Yield the weights under the checkpoint's names."""
        yield from self._embedding.slots(_EMBEDDING)
        yield from self._projection.slots(_PROJECTION)
        yield from self._norm.slots(_NORM)


class Gemma4Layer(DecoderLayer):
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
        self._index = index
        self._scalar = place.vector(1)
        self._gate: Linear | None = None
        if config.layer_inputs:
            size, hidden = config.layer_inputs, config.hidden_size
            self._gate = Linear(hidden, size, bias=False, place=place.inside(_GATE))
            self._out = Linear(size, hidden, bias=False, place=place.inside(_OUT))
            self._out_norm = RMSNorm(hidden, config.rms_norm_eps, place.inside(_OUT_NORM))
            self._activate = ACTIVATE[ACTIVATIONS[config.hidden_act]]

    def __call__(self, stream: ResidualStream, angles: list[Tensor], cache: Any, metadata: Any) -> None:
        """See `DecoderLayer`; the inputs of all layers [T, layers, size] are behind the angles."""
        super().__call__(stream, angles, cache, metadata)
        hidden = stream.read(None)
        if self._gate is not None:
            gated = self._activate(self._gate(hidden)) * angles[-1][:, self._index]
            hidden.add_(self._out_norm(self._out(gated)))
        hidden.mul_(self._scalar)

    def slots(self, prefix: str) -> Slots:
        """See `DecoderLayer.slots`."""
        yield from super().slots(prefix)
        yield f"{prefix}.layer_scalar", WeightSlot.whole(self._scalar)
        if self._gate is not None:
            yield from self._gate.slots(f"{prefix}.{_GATE}")
            yield from self._out.slots(f"{prefix}.{_OUT}")
            yield from self._out_norm.slots(f"{prefix}.{_OUT_NORM}")


class Gemma4ForCausalLM(DecoderForCausalLM):
    """One rank's part of Gemma 4; see `DecoderForCausalLM`."""

    def __init__(self, config: DecoderConfig, **options: Unpack[DecoderOptions]) -> None:
        super().__init__(config, **options)
        self._inputs: LayerInputs | None = None
        if config.layer_inputs:
            place = Place(
                options["dtype"],
                options["device"],
                options.get("packed", ALL_DENSE),
                memory=options.get("memory"),
            )
            self._inputs = LayerInputs(config, place, options.get("parallel", SINGLE))

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See `DecoderForCausalLM.weight_slots`."""
        slots = super().weight_slots()
        if self._inputs is not None:
            slots.update(self._inputs.slots())
        return slots

    def _of_tokens(self, input_ids: Tensor, x: Tensor, positions: Tensor) -> list[Tensor]:
        found = super()._of_tokens(input_ids, x, positions)
        return found if self._inputs is None else [*found, self._inputs.of(input_ids, x)]

    def _layer(self, place: Place, index: int, parallel: ParallelState) -> DecoderLayer:
        mlp = self.feed_forward(index, place.inside("mlp"), parallel)
        return Gemma4Layer(self.config.of_layer(index), index, self.rotaries, mlp, place, parallel)
