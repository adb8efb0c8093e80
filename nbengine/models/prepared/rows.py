"""The operations of a prepared step, and those among them that are functions of rows."""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass

from torch import Tensor

from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.row_functions import ROWS_AT_A_TIME, RowArguments
from nbengine.models.prepared.products import row_bytes


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, and how many of its items there are: one for `tokens_per_item` tokens, or as many as the
    arguments say. `has_tokens`: the arguments have the number of tokens, too. `holds` are operands that nobody else may
    have."""

    function: Function
    arguments: Structure
    tokens_per_item: int = 0
    has_tokens: bool = True
    holds: tuple[Tensor, ...] = ()


def row_operation(
    function: Function,
    x: Tensor,
    other: Tensor,
    output: Tensor,
    *,
    repeats: bool = False,
    eps: float = 0.0,
    picks: int = 0,
) -> Operation:
    """Return a function of the rows of `x` and of `other`, whose outcome goes to `output`; with `repeats`, `other` is
    the same for all rows, and with `picks`, the address of int64 numbers, they say which of its rows it is."""
    arguments = RowArguments(
        x=x.data_ptr(),
        x_stride=row_bytes(x),
        other=other.data_ptr(),
        other_stride=0 if repeats else row_bytes(other),
        picks=picks,
        output=output.data_ptr(),
        output_stride=row_bytes(output),
        eps=eps,
    )
    return Operation(function, arguments, ROWS_AT_A_TIME, holds=(other,))
