"""The operations of which the blocks of a prepared step are made: products, roundings and functions of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nbengine.distributed.communicator import RankOperations
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.dense import CpuDense
from nbengine.kernels.cpu.norm_rounding import NormRoundArguments, compile_norm_round
from nbengine.kernels.cpu.products import ProductArguments, compile_multiply, compile_round_rows
from nbengine.kernels.cpu.records import RecordLayout
from nbengine.kernels.cpu.row_functions import ROWS_AT_A_TIME, compile_rows
from nbengine.kernels.quantized import SPAN
from nbengine.models.layers.basic import Linear, MergedLinear, RMSNorm
from nbengine.models.layers.weights import DenseWeight, PackedWeight, Weight
from nbengine.models.prepared.buffers import StepBuffers
from nbengine.models.prepared.products import aligned, are_packed, layout_of, product_arguments, row_bytes
from nbengine.models.prepared.rows import Operation, row_operation


class BasicOperations:
    """A list of operations on the buffers of a step; `ranks` makes the exchanges with other ranks, if there are any."""

    def __init__(self, buffers: StepBuffers, ranks: RankOperations | None) -> None:
        self.operations: list[Operation] = []
        self._buffers = buffers
        self._ranks = ranks
        self._num_threads = torch.get_num_threads()
        self._input = buffers.normed
        """The rows from which a block begins, where some of its weights are dense."""
        self._is_pending = False
        """True while the output of the block before is still to be added to the residual stream."""

    def _multiply(
        self, linear: Linear, target: Tensor, source: Tensor, records: Tensor | None = None
    ) -> None:
        """Multiply rows of `source`, or `records` that it was rounded to."""
        records = self._buffers.records if records is None else records
        self._product(linear.weight, target, source, records, linear.bias)

    def _multiply_merged(self, merged: MergedLinear, target: Tensor) -> None:
        """Multiply the input of a block."""
        first = 0
        for _, weight in merged.runs:
            own = target[:, first : first + weight.shape[0]]
            bias = merged.bias if len(merged.runs) == 1 else None
            self._product(weight, own, self._input, self._buffers.records, bias)
            first += weight.shape[0]
        if merged.bias is not None and len(merged.runs) > 1:
            self._add(target[:, :first], merged.bias, repeats=True)

    def _round_for(self, weights: Sequence[Weight], source: Tensor, records: Tensor | None = None) -> None:
        """Round rows if they are multiplied with quantised weights, which want them in one layout."""
        layouts = {layout_of(weight) for weight in weights if isinstance(weight, PackedWeight)}
        if layouts:
            (layout,) = layouts
            self._round(source, self._buffers.records if records is None else records, layout)

    def _round(self, source: Tensor, records: Tensor, layout: RecordLayout) -> None:
        arguments = ProductArguments(
            item_size=1,
            spans=source.shape[1] // SPAN,
            x=source.data_ptr(),
            x_stride=row_bytes(source),
            records=records.data_ptr(),
            record_stride=row_bytes(records),
        )
        self.operations.append(Operation(compile_round_rows(layout), arguments, 1))

    def _product(
        self, weight: Weight, target: Tensor, source: Tensor, records: Tensor, bias: Tensor | None = None
    ) -> None:
        if isinstance(weight, PackedWeight):
            arguments = product_arguments(weight, self._num_threads, records, target)
            arguments.records, arguments.output = records.data_ptr(), target.data_ptr()
            self.operations.append(Operation(compile_multiply(weight.form, layout_of(weight)), arguments))
            if bias is not None:
                self._add(target, bias, repeats=True)
        else:
            assert isinstance(weight, DenseWeight)
            self._dense_product(weight, target, source, bias)

    def _dense_product(
        self, weight: DenseWeight, target: Tensor, source: Tensor, bias: Tensor | None
    ) -> None:
        assert isinstance(weight.products, CpuDense)
        function, arguments = weight.products.operation(weight.tensor, self._num_threads)
        arguments.x, arguments.x_stride = source.data_ptr(), row_bytes(source)
        arguments.output, arguments.output_stride = target.data_ptr(), row_bytes(target)
        arguments.packed = aligned(self._buffers.laid_out)
        arguments.bias = 0 if bias is None else bias.data_ptr()
        self.operations.append(Operation(function, arguments))

    def _add(self, target: Tensor, other: Tensor, *, repeats: bool) -> None:
        function = compile_rows("add", target.shape[1], Element.FLOAT32)
        self.operations.append(row_operation(function, target, other, target, repeats=repeats))

    def _normalise(self, norm: RMSNorm, source: Tensor, target: Tensor) -> None:
        function = compile_rows("rms_norm", norm.shape[0], Element.FLOAT32)
        self.operations.append(
            row_operation(function, source, norm.weight, target, repeats=True, eps=norm.eps)
        )

    def _normalise_each(self, norm: RMSNorm, count: int, source: Tensor, target: Tensor) -> None:
        """Normalise `count` parts of each row, as long as the norm's weight."""
        function = compile_rows("rms_norm_heads", count, Element.FLOAT32, norm.shape[0])
        self.operations.append(
            row_operation(function, source, norm.weight, target, repeats=True, eps=norm.eps)
        )

    def _scale(self, x: Tensor, factor: Tensor) -> None:
        """Multiply rows with the one number of `factor`."""
        function = compile_rows("scale", x.shape[1], Element.FLOAT32)
        self.operations.append(row_operation(function, x, factor, x, repeats=True))

    def _sum_over_ranks(self, x: Tensor) -> None:
        if self._ranks is not None:
            self.operations.append(Operation(*self._ranks.sum_rows(x)))

    def _add_norm_round(
        self, norm: RMSNorm | None, weights: Sequence[Weight], *, has_experts: bool = False
    ) -> None:
        """Add what is pending to the residual stream, and normalise it: to `records` for quantised weights, those of
        experts among them, and to the block's input for dense ones. Without a norm that is the stream itself."""
        buffers = self._buffers
        if norm is not None and are_packed(weights):
            self._add_norm_and_round(norm)
            return
        self._add_pending()
        self._input = buffers.x
        if norm is not None:
            self._input = buffers.normed
            self._normalise(norm, buffers.x, buffers.normed)
        if has_experts:
            self._round(self._input, buffers.records, buffers.layout)
        else:
            self._round_for(weights, self._input)
        self._is_pending = True

    def _add_pending(self) -> None:
        if self._is_pending:
            self._add(self._buffers.x, self._buffers.out, repeats=False)
        self._is_pending = False

    def _add_norm_and_round(self, norm: RMSNorm) -> None:
        buffers = self._buffers
        arguments = NormRoundArguments(
            x=buffers.x.data_ptr(),
            x_stride=row_bytes(buffers.x),
            added=buffers.out.data_ptr(),
            added_stride=row_bytes(buffers.out),
            weight=norm.weight.data_ptr(),
            records=buffers.records.data_ptr(),
            record_stride=row_bytes(buffers.records),
            eps=norm.eps,
        )
        function = compile_norm_round(norm.shape[0], buffers.layout, adds=self._is_pending)
        self.operations.append(Operation(function, arguments, ROWS_AT_A_TIME))
        self._is_pending = True
