"""Products with quantised weights on the CPU, run on torch's threads."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu.integers import QuadProduct
from nbengine.kernels.cpu.jit import Function, host_processor
from nbengine.kernels.cpu.products import (
    ProductArguments,
    compile_multiply,
    compile_round_rows,
    multiplies_with,
)
from nbengine.kernels.cpu.records import RecordLayout
from nbengine.kernels.cpu.taken_rows import TakeArguments, compile_take_rows
from nbengine.kernels.cpu.threads import select_runner
from nbengine.kernels.quantized import SPAN, Format

_SHARES = 4
"""Parts of the work that each thread gets at least, if there are as many: the last one to end is waited for."""
_FEW_ROUNDED = 1 << 12
"""Values up to which the calling thread rounds the rows alone: to wake another takes as long."""


_FEW_TAKEN = 1 << 14
"""Values up to which the calling thread takes rows alone."""


class CpuProducts:
    """Products with float32 activations; for one thread at a time, the one that calls torch."""

    name = "cpu"

    def __init__(self) -> None:
        self._forms: set[tuple[Format, RecordLayout]] = set()
        self._run = select_runner()
        self._arguments = ProductArguments()
        self._records = torch.empty(0, dtype=torch.uint8)

    @property
    def instructions(self) -> str:
        """Return the names of the instructions that multiply with the formats that are compiled."""
        found = {multiplies_with(*form) for form in self._forms} or {QuadProduct.best(host_processor())}
        return ", ".join(sorted(kind.value for kind in found))

    def warm_up(self, form: Format, activation_bits: int = 8) -> None:
        """Compile for a format, once a process; otherwise the first use does."""
        layout = RecordLayout(activation_bits)
        self._forms.add((form, layout))
        compile_round_rows(layout)
        compile_multiply(form, layout)
        compile_take_rows(form)

    def linear(
        self, x: Tensor, form: Format, data: Tensor, out_features: int, activation_bits: int = 8
    ) -> Tensor:
        """See `nbengine.kernels.quantized_kernels.QuantizedProducts.linear`."""
        rows, columns = x.shape
        tiles, cells, _ = data.shape
        layout = RecordLayout(activation_bits)
        if x.dtype is not torch.float32 or cells * form.columns != columns:
            found = (x.dtype, columns)
            raise InvalidArgumentError("x", found, f"float32 with {cells * form.columns} columns")
        x = x if x.stride(1) == 1 else x.contiguous()
        output = torch.empty(rows, out_features, dtype=torch.float32)
        record_stride = columns // SPAN * layout.bytes
        if rows * record_stride > len(self._records):
            self._records = torch.empty(rows * record_stride, dtype=torch.uint8)
        threads = torch.get_num_threads()
        arguments = self._arguments
        arguments.rows, arguments.spans, arguments.tiles = rows, columns // SPAN, tiles
        arguments.x, arguments.x_stride = x.data_ptr(), x.stride(0) * x.element_size()
        arguments.records, arguments.record_stride = self._records.data_ptr(), record_stride
        arguments.weight, arguments.tile_bytes = data.data_ptr(), data.stride(0)
        arguments.output, arguments.output_stride = output.data_ptr(), out_features * output.element_size()
        arguments.out_features = out_features
        self._run_on(1 if x.numel() <= _FEW_ROUNDED else threads, compile_round_rows(layout), rows)
        self._run_on(threads, compile_multiply(form, layout), tiles)
        return output

    def rows(self, ids: Tensor, form: Format, data: Tensor) -> Tensor:
        """See `nbengine.kernels.quantized_kernels.QuantizedProducts.rows`."""
        _, cells, _ = data.shape
        ids = ids.contiguous()
        output = torch.empty(len(ids), cells * form.columns, dtype=torch.float32)
        arguments = TakeArguments(
            items=len(ids),
            ids=ids.data_ptr(),
            cells=cells,
            weight=data.data_ptr(),
            tile_bytes=data.stride(0),
            output=output.data_ptr(),
            output_stride=output.stride(0) * output.element_size(),
        )
        threads = torch.get_num_threads() if output.numel() > _FEW_TAKEN else 1
        self._run(compile_take_rows(form), ctypes.addressof(arguments), threads)
        return output

    def _run_on(self, threads: int, function: Function, count: int) -> None:
        """Run a function over `count` tiles or rows."""
        size = share_size(count, threads)
        self._arguments.counter = 0
        self._arguments.item_size, self._arguments.items = size, -(-count // size)
        self._run(function, ctypes.addressof(self._arguments), threads)


@lru_cache(maxsize=1024)
def share_size(count: int, threads: int) -> int:
    """Return the size of the parts in which `threads` draw `count` tiles or rows: the largest one of those with
    which the thread that has most has least, each having some parts."""
    largest = -(-max(1, count) // (threads * _SHARES))
    sizes = range(largest, largest // 2, -1)
    return min(sizes, key=lambda size: -(-count // (size * threads)) * size)


def supports_quantized() -> bool:
    """Return whether there are products on this processor: their scales are float16."""
    return host_processor().converts_float16
