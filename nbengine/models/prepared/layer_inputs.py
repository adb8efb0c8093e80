"""The operations of layers that take numbers of tokens beside the residual stream, and scale it, in a prepared step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nbengine.distributed.communicator import RankOperations
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.row_functions import compile_rows
from nbengine.kernels.cpu.taken_rows import TakeArguments, compile_take_rows
from nbengine.kernels.quantized import LANES
from nbengine.models.layers.layer_inputs import MEAN_OF_TWO, InputLayer, LayerInputs
from nbengine.models.layers.parallel_layers import VocabParallelEmbedding
from nbengine.models.layers.weights import PackedWeight
from nbengine.models.prepared.buffers import StepBuffers
from nbengine.models.prepared.output_operations import OutputOperations
from nbengine.models.prepared.products import row_bytes
from nbengine.models.prepared.rows import Operation, row_operation


@dataclass(frozen=True, slots=True)
class InputBuffers:
    """The memory in which these operations leave numbers for each other, float32."""

    own: Tensor
    """[tokens, layers * size], as the next one: the inputs of all layers."""
    projected: Tensor
    gate: Tensor
    """[tokens, size]."""

    @classmethod
    def make(cls, inputs: LayerInputs, tokens: int) -> InputBuffers:
        """Allocate them for steps of up to `tokens`."""
        own, projected = torch.empty(2, tokens, inputs.num_layers * inputs.size, dtype=torch.float32)
        return cls(own, projected, torch.empty(tokens, inputs.size, dtype=torch.float32))


class InputOperations(OutputOperations):
    """A list of operations to which those of a step's inputs are added."""

    def __init__(
        self, buffers: StepBuffers, ranks: RankOperations | None, inputs: InputBuffers | None
    ) -> None:
        super().__init__(buffers, ranks)
        self._ids, self._positions, _ = (row.data_ptr() for row in buffers.own[0])
        self._inputs = inputs

    def add_embedding(self, embedding: VocabParallelEmbedding, scale: float) -> None:
        """Turn token ids into rows, times `scale`."""
        self._take(embedding, self._buffers.x, scale)

    def add_inputs(self, inputs: LayerInputs) -> None:
        """Make the inputs of all layers of token ids, and of the rows with which the residual stream begins."""
        own, x = self._inputs, self._buffers.x
        assert own is not None
        self._take(inputs.embedding, own.own, inputs.own_scale)
        self._round_for([inputs.projection.weight], x)
        self._multiply(inputs.projection, own.projected, x)
        self._scale(own.projected, torch.tensor([inputs.scale], dtype=torch.float32))
        self._normalise_each(inputs.norm, inputs.num_layers, own.projected, own.projected)
        self._add(own.own, own.projected, repeats=False)
        self._scale(own.own, torch.tensor([MEAN_OF_TWO], dtype=torch.float32))

    def end_layer(self, layer: InputLayer) -> None:
        """Add what a layer makes of its inputs to the residual stream, if it has any, and scale the stream."""
        buffers, x = self._buffers, self._buffers.x
        self._add_pending()
        if layer.gate is not None:
            own = self._inputs
            assert own is not None
            size = own.gate.shape[1]
            inputs = own.own[:, layer.index * size : (layer.index + 1) * size]
            self._round_for([layer.gate.weight], x)
            self._multiply(layer.gate, own.gate, x)
            gated = compile_rows(layer.activation, size, Element.FLOAT32)
            self.operations.append(row_operation(gated, own.gate, inputs, own.gate))
            self._round_for([layer.out.weight], own.gate)
            self._multiply(layer.out, buffers.out, own.gate)
            self._normalise(layer.out_norm, buffers.out, buffers.out)
            self._add(x, buffers.out, repeats=False)
        self._scale(x, layer.scalar)

    def _take(self, embedding: VocabParallelEmbedding, target: Tensor, scale: float) -> None:
        weight = embedding.weight
        is_packed = isinstance(weight, PackedWeight)
        form = weight.form if isinstance(weight, PackedWeight) else ELEMENTS[weight.tensor.dtype]
        take = TakeArguments(
            ids=self._ids,
            cells=weight.tensor.shape[1] if is_packed else weight.shape[1] // LANES,
            weight=weight.tensor.data_ptr(),
            tile_bytes=row_bytes(weight.tensor),
            output=target.data_ptr(),
            output_stride=row_bytes(target),
            first=embedding.own.start,
            count=len(embedding.own),
        )
        function = compile_take_rows(form, is_part=self._ranks is not None)
        self.operations.append(Operation(function, take, 1, has_tokens=False))
        self._sum_over_ranks(target)
        if scale != 1:
            self._scale(target, torch.tensor([scale], dtype=torch.float32))
