"""Products with dense weights on the CPU, run on torch's threads."""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu.codegen import Element, define
from nbengine.kernels.cpu.dense_parts import (
    ROW_GROUP,
    DenseArguments,
    DenseKind,
    Instructions,
    laid_out_bytes,
)
from nbengine.kernels.cpu.dense_splits import define_splits, split_shapes
from nbengine.kernels.cpu.dense_tiles import OUTPUTS, define_tiles, shapes_for
from nbengine.kernels.cpu.dense_vectors import Block, multiply_vectors
from nbengine.kernels.cpu.elements import ELEMENTS, supports
from nbengine.kernels.cpu.flags import address_of
from nbengine.kernels.cpu.head_products import head_operation
from nbengine.kernels.cpu.jit import Function, Processor, host_processor
from nbengine.kernels.cpu.quantized import share_size
from nbengine.kernels.cpu.threads import select_runner
from nbengine.kernels.cpu.trials import compile_tried

_FEW = 1 << 15
"""Numbers of a weight up to which the calling thread multiplies a few rows alone: to wake another takes as long."""
_BLOCK_BYTES = 1 << 20
"""Bytes of rows of x that are multiplied again with one part of the weight after the other: the second cache holds
them."""
_NARROW = (torch.bfloat16, torch.float16)


def supports_dense(dtype: torch.dtype) -> bool:
    """Return whether there are products with weights of a type on this processor."""
    return dtype in _NARROW and supports(dtype)


def has_split_products() -> bool:
    """Return whether float32 is multiplied in tiles of bfloat16 on this processor.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    best, *_ = Instructions.of(host_processor(), ELEMENTS[torch.float32])
    return best is Instructions.SPLITS and CpuDense().chosen(torch.float32) is best


class CpuDense(threading.local):
    """Products with dense weights; each thread that calls torch has its own memory for them.

    They use the best of the processor's `instructions` for the weight's type, or those that are given.
    """

    name = "cpu"
    are_compiled = True

    def __init__(self, instructions: Instructions | None = None) -> None:
        self._given = instructions
        self._run = select_runner()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._arguments = ctypes.create_string_buffer(ctypes.sizeof(DenseArguments))
        self._address = ctypes.addressof(self._arguments)
        self._fill = struct.Struct(f"{len(DenseArguments._fields_)}q").pack_into
        self._yield = address_of("sched_yield")
        self._kinds: dict[tuple[torch.dtype, torch.dtype], tuple[DenseKind, Function, int]] = {}

    @property
    def instructions(self) -> str:
        """Return the name of the instructions for bfloat16."""
        return self.chosen(torch.bfloat16).value

    def chosen(self, dtype: torch.dtype) -> Instructions:
        """Return the instructions for rows and weights of a type.

        Raises:
            NBEngineError: LLVM has no code generator for this processor.
        """
        kind, _, _ = self._compiled(dtype, dtype)
        return kind.instructions

    def warm_up(self, dtype: torch.dtype, hidden_dtype: torch.dtype) -> None:
        """See `nbengine.kernels.dense_kernels.DenseProducts.warm_up`.

        Raises:
            NBEngineError: LLVM has no code generator for this processor.
        """
        self._compiled(dtype, hidden_dtype)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `nbengine.kernels.dense_kernels.DenseProducts.linear`."""
        rows, columns = x.shape
        out_features, found = weight.shape
        dtype, hidden = weight.dtype, x.dtype
        kind, function, outputs = self._compiled(dtype, hidden)
        if found != columns:
            raise InvalidArgumentError("x", tuple(x.shape), f"rows of {found} numbers")
        if x.stride(1) != 1:
            x = x.contiguous()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        if out is None:
            out = torch.empty(rows, out_features, dtype=hidden)
        if bias is not None:
            _check_bias(bias, hidden, out_features)
        if not rows or not out_features:
            return out
        row_bytes = kind.row_bytes(columns)
        groups = -(-out_features // outputs)
        is_small = weight.numel() <= _FEW and rows <= ROW_GROUP
        threads = 1 if is_small else torch.get_num_threads()
        size, block_bytes = laid_out_bytes(rows, row_bytes), _BLOCK_BYTES
        if kind.instructions is Instructions.SPLITS:
            # Each thread has the parts of a group of the weight's rows beside them.
            size += threads * (row_bytes + kind.block_bytes) * OUTPUTS
            block_bytes -= row_bytes * OUTPUTS
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8)
        share = share_size(groups, threads)
        block = _block_of(row_bytes, block_bytes)
        x_size, bias_at = x.element_size(), 0 if bias is None else bias.data_ptr()
        packed = -(-self._memory.data_ptr() // 64) * 64
        self._fill(
            self._arguments,
            0,
            *(0, -(-groups // share), rows, share, groups, block),
            *(columns, out_features, x.data_ptr(), x.stride(0) * x_size, packed),
            *(weight.data_ptr(), weight.stride(0) * weight.element_size()),
            *(bias_at, out.data_ptr(), out.stride(0) * x_size),
            *(shapes_of(kind.instructions, out_features), self._yield, 0),
        )
        self._run(function, self._address, threads)
        return out

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `nbengine.kernels.dense_kernels.DenseProducts.by_head`."""
        if x.stride(2) != 1:
            x = x.contiguous()
        if 1 not in weight.stride()[1:]:
            weight = weight.contiguous()
        out = torch.empty(x.shape[0], x.shape[1], weight.shape[2], dtype=x.dtype)
        if out.numel():
            function, arguments = head_operation(x, weight, out)
            threads = 1 if weight.numel() <= _FEW else torch.get_num_threads()
            self._run(function, ctypes.addressof(arguments), threads)
        return out

    def operation(self, weight: Tensor, num_threads: int) -> tuple[Function, DenseArguments]:
        """Return the function of a product of float32 rows with a weight of 16 bits, as operation of a program on
        `num_threads`, with what of its arguments depends on the weight: callers add rows, memory and bias."""
        kind, function, outputs = self._compiled(weight.dtype, torch.float32)
        out_features, columns = weight.shape
        groups = -(-out_features // outputs)
        share = share_size(groups, num_threads)
        return function, DenseArguments(
            items=-(-groups // share),
            item_size=share,
            groups=groups,
            block=_block_of(kind.row_bytes(columns), _BLOCK_BYTES),
            columns=columns,
            out_features=out_features,
            weight=weight.data_ptr(),
            weight_stride=weight.stride(0) * weight.element_size(),
            shapes=shapes_of(kind.instructions, out_features),
            give_away=self._yield,
        )

    def _compiled(self, dtype: torch.dtype, hidden: torch.dtype) -> tuple[DenseKind, Function, int]:
        if (known := self._kinds.get((dtype, hidden))) is not None:
            return known
        if dtype not in ELEMENTS or hidden not in (dtype, torch.float32):
            raise InvalidArgumentError("x", (hidden, dtype), "float32 or a 16-bit weight's own type")
        elements = ELEMENTS[dtype], ELEMENTS[hidden]
        found = self._kinds[dtype, hidden] = compile_dense(*elements, self._given)
        return found


def _block_of(row_bytes: int, block_bytes: int) -> int:
    """Return the rows of x, each of `row_bytes`, that are multiplied with one part of the weight after the other."""
    return max(1, block_bytes // max(1, row_bytes * 2 * ROW_GROUP)) * 2 * ROW_GROUP


def shapes_of(instructions: Instructions, out_features: int) -> int:
    """Return the address of the tiles' shapes; 0 where there are none."""
    match instructions:
        case Instructions.TILES:
            return shapes_for(out_features)
        case Instructions.SPLITS:
            return split_shapes()
        case _:
            return 0


def _check_bias(bias: Tensor, hidden: torch.dtype, out_features: int) -> None:
    if bias.dtype is not hidden or bias.shape != (out_features,) or bias.stride(0) != 1:
        raise InvalidArgumentError("bias", (bias.dtype, tuple(bias.shape)), f"{out_features} of {hidden}")


@cache
def compile_dense(
    weight: Element, hidden: Element, given: Instructions | None = None
) -> tuple[DenseKind, Function, int]:
    """Compile the function of `DenseArguments` for types of the weight and of x, with the given or the best
    instructions; return its kind, the function and how many rows of the weight are a group.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.dense_trials import try_dense

    def choose(processor: Processor) -> tuple[DenseKind, Block]:
        best, *_ = Instructions.of(processor, weight)
        return DenseKind(given or best, weight, hidden), Block.of(processor.accumulators)

    (function,), (kind, block) = compile_tried(_define_dense, ["dense"], choose, try_dense)
    return kind, function, outputs_of(kind, block)


def outputs_of(kind: DenseKind, block: Block) -> int:
    """Return the rows of the weight that are a group."""
    return OUTPUTS if kind.instructions in (Instructions.TILES, Instructions.SPLITS) else block.outputs


def _define_dense(module: ir.Module, kind: DenseKind, block: Block) -> None:
    if kind.instructions is Instructions.TILES:
        define_tiles(module, "dense", kind)
    elif kind.instructions is Instructions.SPLITS:
        define_splits(module, "dense", kind)
    else:
        define(module, "dense", 1, partial(multiply_vectors, kind, block), exported=True)
