"""The operations of a layer with quantised experts, with the addresses of their operands."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.cpu.codegen import MAX_LANES, Element
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.expert_steps import (
    EXPERT_WORDS,
    CombineArguments,
    EachArguments,
    ExpertMemory,
    SortArguments,
    SpreadArguments,
    compile_combine,
    compile_each,
    compile_sort,
    compile_spread,
)
from nbengine.kernels.cpu.products import compile_gated, compile_multiply
from nbengine.kernels.cpu.program import words_of
from nbengine.kernels.cpu.records import RecordLayout
from nbengine.kernels.cpu.routing import ScoreArguments, compile_scores
from nbengine.kernels.cpu.row_functions import compile_rows
from nbengine.kernels.cpu.vectors import Activation
from nbengine.kernels.quantized import SPAN
from nbengine.models.layers.moe import SparseMoeBlock
from nbengine.models.layers.packed_experts import PackedExperts
from nbengine.models.layers.weights import DenseWeight
from nbengine.models.prepared.buffers import StepBuffers
from nbengine.models.prepared.products import gated_arguments, product_arguments, row_bytes
from nbengine.models.prepared.rows import Operation, row_operation


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """The memory in which the operations of all layers with experts leave numbers for each other; a *place* is a
    token's row in the memory of one of its experts."""

    scores: Tensor
    """[tokens, experts, rounded up], float32."""
    weights: Tensor
    """[tokens, experts of a token], float32, as the next two, int64."""
    chosen: Tensor
    places: Tensor
    records: Tensor
    """The rounded rows of the experts' input; see `nbengine.kernels.cpu.products`."""
    gated_records: Tensor
    outputs: Tensor
    """[places + 1, hidden], float32: the last row is 0."""
    starts: Tensor
    active: Tensor
    count: Tensor
    shared: Tensor
    """[tokens, hidden], float32: the output of the block that all tokens go through, beside the experts."""
    shared_scores: Tensor
    """[tokens, 16], float32: the first number is the score of that block's gate."""

    @classmethod
    def make(
        cls, blocks: Sequence[SparseMoeBlock], tokens: int, layout: RecordLayout
    ) -> ExpertBuffers | None:
        """Allocate them for steps of up to `tokens`, with rounded rows of a layout; None: there are no such layers."""
        if not blocks:
            return None
        first = blocks[0]
        assert first.routing is not None
        per_token, shard = first.moe.experts_per_token, first.experts.shard
        places = tokens * per_token
        has_shared = first.shared is not None or first.moe.beside_dense

        def records(columns: int) -> Tensor:
            return torch.empty(places, columns // SPAN * layout.bytes, dtype=torch.uint8)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64)

        return cls(
            scores=torch.empty(tokens, first.routing.width, dtype=torch.float32),
            weights=torch.empty(tokens, per_token, dtype=torch.float32),
            chosen=integers(tokens, per_token),
            places=integers(tokens, per_token),
            records=records(first.hidden_size),
            gated_records=records(len(shard.inner)),
            outputs=torch.zeros(places + 1, first.hidden_size, dtype=torch.float32),
            starts=integers(len(shard.experts) + 1),
            active=integers(len(shard.experts)),
            count=integers(1),
            shared=torch.empty(tokens, first.hidden_size if has_shared else 0, dtype=torch.float32),
            shared_scores=torch.empty(tokens, MAX_LANES, dtype=torch.float32),
        )


class ExpertOperations:
    """The operations between the normalised rows of a layer, `buffers.normed` and `buffers.records`, and this rank's
    part of its experts' output, `buffers.out`."""

    def __init__(self, buffers: StepBuffers, experts: ExpertBuffers, num_threads: int) -> None:
        self._buffers, self._experts, self._num_threads = buffers, experts, num_threads
        own = experts
        self._memory = ExpertMemory(
            records=own.records.data_ptr(),
            record_stride=row_bytes(own.records),
            gated=own.gated_records.data_ptr(),
            gated_stride=row_bytes(own.gated_records),
            outputs=own.outputs.data_ptr(),
            output_stride=row_bytes(own.outputs),
        )
        self._products: list[NDArray[np.int64]] = []
        """The arguments of all experts' products, kept as long as the operations."""

    def scores(self, block: SparseMoeBlock) -> Iterator[Operation]:
        """Yield the operations of a router behind its product where that is quantised: they leave scores."""
        own, weight, bias = self._experts, block.router.weight, block.router.bias
        if isinstance(weight, DenseWeight):
            yield self.score(weight.tensor, own.scores)
        if bias is not None:
            add = compile_rows("add", len(bias), Element.FLOAT32)
            yield row_operation(add, own.scores, bias, own.scores, repeats=True)

    def of(self, block: SparseMoeBlock) -> Iterator[Operation]:
        """Yield the operations of a layer's experts behind those of the router."""
        blocks, routing = block.experts.blocks, block.routing
        assert isinstance(blocks, PackedExperts)
        assert routing is not None
        own, pairs = self._experts, blocks.pairs()
        per_token, nowhere = routing.per_token, len(own.outputs) - 1
        yield Operation(*routing.operation(own.scores, own.weights, own.chosen), 1)
        gates, downs = self._products_of(blocks, block.moe.activation)
        numbers = block.experts.numbers
        sort = SortArguments(
            items=1,
            per_token=per_token,
            experts=len(pairs),
            chosen=own.chosen.data_ptr(),
            numbers=0 if numbers is None else numbers.data_ptr(),
            places=own.places.data_ptr(),
            nowhere=nowhere,
            starts=own.starts.data_ptr(),
            active=own.active.data_ptr(),
            count=own.count.data_ptr(),
            gates=gates.ctypes.data,
            downs=downs.ctypes.data,
            memory=ctypes.addressof(self._memory),
        )
        yield Operation(compile_sort(), sort)
        spread = SpreadArguments(
            per_token=per_token,
            places=own.places.data_ptr(),
            nowhere=nowhere,
            records=self._buffers.records.data_ptr(),
            record_stride=row_bytes(self._buffers.records),
            output=own.records.data_ptr(),
            output_stride=row_bytes(own.records),
        )
        yield Operation(compile_spread(), spread, 1)
        (gate_up, down), (gate_bias, down_bias) = pairs[0], blocks.biases()[0]
        layout = self._buffers.layout
        for function, arguments in (
            (
                compile_gated(gate_up.form, layout, block.moe.activation, has_bias=gate_bias is not None),
                gates,
            ),
            (compile_multiply(down.form, layout, has_bias=down_bias is not None), downs),
        ):
            each = EachArguments(
                function=function.address,
                arguments=arguments.ctypes.data,
                active=own.active.data_ptr(),
                count=own.count.data_ptr(),
            )
            yield Operation(compile_each(), each, has_tokens=False)
        yield Operation(compile_combine(block.hidden_size), self._combine(per_token), 1)

    def _products_of(
        self, blocks: PackedExperts, activation: Activation
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the arguments of each expert's products."""
        own, threads = self._experts, self._num_threads
        gates, downs = [], []
        for (gate_up, down), (gate_bias, down_bias) in zip(blocks.pairs(), blocks.biases(), strict=True):
            gated = gated_arguments(gate_up, activation, threads, own.records, own.gated_records)
            product = product_arguments(down, threads, own.gated_records, own.outputs)
            if gate_bias is not None:
                gated.gate_bias = gate_bias.data_ptr()
                gated.up_bias = gate_bias[len(gate_bias) // 2 :].data_ptr()
            if down_bias is not None:
                product.bias = down_bias.data_ptr()
            gates.append(gated)
            downs.append(product)
        return self._kept(gates), self._kept(downs)

    def score(self, weight: Tensor, scores: Tensor) -> Operation:
        """Return the operation that multiplies the normalised rows with a dense weight."""
        normed = self._buffers.normed
        arguments = ScoreArguments(
            items=len(weight),
            columns=weight.shape[1],
            x=normed.data_ptr(),
            x_stride=row_bytes(normed),
            weight=weight.data_ptr(),
            output=scores.data_ptr(),
            output_stride=row_bytes(scores),
        )
        return Operation(compile_scores(ELEMENTS[weight.dtype]), arguments)

    def _combine(self, per_token: int) -> CombineArguments:
        own, out = self._experts, self._buffers.out
        return CombineArguments(
            per_token=per_token,
            weights=own.weights.data_ptr(),
            places=own.places.data_ptr(),
            outputs=own.outputs.data_ptr(),
            output_stride=row_bytes(own.outputs),
            sums=out.data_ptr(),
            sum_stride=row_bytes(out),
        )

    def _kept(self, each: Sequence[ctypes.Structure]) -> NDArray[np.int64]:
        words = np.stack([words_of(arguments, EXPERT_WORDS) for arguments in each])
        assert words.shape[1] == EXPERT_WORDS
        self._products.append(words)
        return words
