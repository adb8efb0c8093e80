"""The operations of which the blocks of a prepared step are made: products, roundings and functions of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from nbengine.distributed.communicator import RankOperations
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.products import ProductArguments, compile_multiply, compile_round_rows
from nbengine.kernels.cpu.row_functions import compile_rows
from nbengine.kernels.quantized import SPAN
from nbengine.models.layers.basic import Linear, MergedLinear, RMSNorm
from nbengine.models.layers.weights import PackedWeight
from nbengine.models.prepared.buffers import StepBuffers
from nbengine.models.prepared.products import product_arguments, row_bytes
from nbengine.models.prepared.rows import Operation, row_operation


class BasicOperations:
    """A list of operations on the buffers of a step; `ranks` makes the exchanges with other ranks, if there are any."""

    def __init__(self, buffers: StepBuffers, ranks: RankOperations | None) -> None:
        self.operations: list[Operation] = []
        self._buffers = buffers
        self._ranks = ranks
        self._num_threads = torch.get_num_threads()

    def _multiply(self, linear: Linear, target: Tensor, records: Tensor | None = None) -> None:
        assert isinstance(linear.weight, PackedWeight)
        self._product(linear.weight, target, self._buffers.records if records is None else records)
        if linear.bias is not None:
            self._add(target, linear.bias, repeats=True)

    def _multiply_merged(self, merged: MergedLinear, target: Tensor) -> None:
        first = 0
        for _, weight in merged.runs:
            assert isinstance(weight, PackedWeight)
            self._product(weight, target[:, first:], self._buffers.records)
            first += weight.shape[0]
        if merged.bias is not None:
            self._add(target, merged.bias, repeats=True)

    def _round(self, source: Tensor, records: Tensor | None = None) -> None:
        records = self._buffers.records if records is None else records
        arguments = ProductArguments(
            item_size=1,
            spans=source.shape[1] // SPAN,
            x=source.data_ptr(),
            x_stride=row_bytes(source),
            records=records.data_ptr(),
            record_stride=row_bytes(records),
        )
        self.operations.append(Operation(compile_round_rows(), arguments, 1))

    def _product(self, weight: PackedWeight, target: Tensor, records: Tensor) -> None:
        arguments = product_arguments(weight, self._num_threads, records, target)
        arguments.records, arguments.output = records.data_ptr(), target.data_ptr()
        self.operations.append(Operation(compile_multiply(weight.form), arguments))

    def _add(self, target: Tensor, other: Tensor, *, repeats: bool) -> None:
        function = compile_rows("add", target.shape[1], Element.FLOAT32)
        self.operations.append(row_operation(function, target, other, target, repeats=repeats))

    def _normalise(self, norm: RMSNorm, source: Tensor, target: Tensor) -> None:
        function = compile_rows("rms_norm", norm.shape[0], Element.FLOAT32)
        self.operations.append(
            row_operation(function, source, norm.weight, target, repeats=True, eps=norm.eps)
        )

    def _sum_over_ranks(self, x: Tensor) -> None:
        if self._ranks is not None:
            self.operations.append(Operation(*self._ranks.sum_rows(x)))
