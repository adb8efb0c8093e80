"""The trials of products with dense weights: see `nbengine.kernels.cpu.trials`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.dense import outputs_of, shapes_of
from nbengine.kernels.cpu.dense_parts import (
    ROW_GROUP,
    DenseArguments,
    DenseKind,
    Instructions,
    laid_out_bytes,
)
from nbengine.kernels.cpu.dense_tiles import OUTPUTS
from nbengine.kernels.cpu.dense_vectors import Block
from nbengine.kernels.cpu.elements import TYPES
from nbengine.kernels.cpu.flags import address_of
from nbengine.kernels.cpu.head_products import HeadShape, head_arguments
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.trials import Trial, is_near, poisoned, random_numbers

_ROWS, _COLUMNS, _FEATURES = ROW_GROUP + 5, 70, 40
"""Rows, columns and outputs that do not fill the last group, vector or tile."""
_UNIT = 2.0**-24
"""The error of one rounding in float32."""
_ROUNDINGS_OF_SPLITS = 6
"""Sums of products for each number of float32, which is cut in three."""


def try_dense(functions: Sequence[Function], kind: DenseKind, block: Block) -> Trial:
    """Try the function that multiplies."""
    dtype, hidden = TYPES[kind.weight], TYPES[kind.hidden]
    x = random_numbers(_ROWS, _COLUMNS, dtype=hidden, seed=1)
    weight = random_numbers(_FEATURES, _COLUMNS, dtype=dtype, seed=2)
    bias = random_numbers(_FEATURES, dtype=hidden, seed=3)
    output = poisoned((_ROWS, _FEATURES), hidden)
    row_bytes, groups = kind.row_bytes(_COLUMNS), -(-_FEATURES // outputs_of(kind, block))
    size = laid_out_bytes(_ROWS, row_bytes) + (row_bytes + kind.block_bytes) * OUTPUTS
    memory = torch.empty(size, dtype=torch.uint8)
    arguments = DenseArguments(
        items=1,
        rows=_ROWS,
        item_size=groups,
        groups=groups,
        block=2 * ROW_GROUP,
        columns=_COLUMNS,
        out_features=_FEATURES,
        x=x.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        packed=-(-memory.data_ptr() // 64) * 64,
        weight=weight.data_ptr(),
        weight_stride=weight.stride(0) * weight.element_size(),
        bias=bias.data_ptr(),
        output=output.data_ptr(),
        output_stride=output.stride(0) * output.element_size(),
        shapes=shapes_of(kind.instructions, _FEATURES),
        give_away=address_of("sched_yield"),
    )
    yield [(functions[0], arguments)]
    rows = (x.bfloat16() if kind.weight is Element.BFLOAT16 else x).double()
    sizes = rows.abs() @ weight.double().abs().T + bias.double().abs()
    times = _ROUNDINGS_OF_SPLITS if kind.instructions is Instructions.SPLITS else 1
    error = sizes * ((times * _COLUMNS + 4) * _UNIT)
    return is_near(output, rows @ weight.double().T + bias.double(), error)


def try_heads(functions: Sequence[Function], shape: HeadShape, _accumulators: int) -> Trial:
    """Try the function that multiplies each head with a matrix of its own."""
    dtype, hidden = TYPES[shape.element], TYPES[shape.row_element]
    sizes = (shape.outputs, shape.columns) if shape.stands else (shape.columns, shape.outputs)
    x = random_numbers(3, 2, shape.columns, dtype=hidden, seed=1)
    weight = random_numbers(2, *sizes, dtype=dtype, seed=2)
    weight = weight.transpose(1, 2) if shape.stands else weight
    output = poisoned((3, 2, shape.outputs), hidden)
    yield [(functions[0], head_arguments(shape, x, weight, output))]
    rows, matrix = x.double().transpose(0, 1), weight.double()
    error = (rows.abs() @ matrix.abs()) * (shape.columns * _UNIT)
    return is_near(output, (rows @ matrix).transpose(0, 1), error.transpose(0, 1))
