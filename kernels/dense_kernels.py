"""The products with dense weights, and the choice of those of a device."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Protocol

import torch

from nbengine.errors import NBEngineError

logger = logging.getLogger(__name__)


class DenseProducts(Protocol):
    """Products with dense weights whose results for a row depend on nothing but the row: neither on the number of
    rows, nor on a row's place, nor on the number of threads. They serve one thread at a time, the one that calls
    torch."""

    name: str
    are_compiled: bool
    """They are functions compiled for this machine, which a program can call, and round nothing to float16."""

    @property
    def instructions(self) -> str:
        """Return the name of the processor's instructions that they use."""

    def warm_up(self, dtype: torch.dtype, hidden_dtype: torch.dtype) -> None:
        """Compile what weights of type `dtype` and rows of `hidden_dtype` need, so that no step waits for it."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ weight.T + bias, [T, out_features], for x [T, in_features] and weight [out_features,
        in_features], bfloat16 or float16, or float32 where `select_split` has chosen them.

        x and bias are of the weight's type or float32; x is rounded to bfloat16 for a weight of that type, sums and the
        bias's addition are float32, and the result is of the type of x, rounded once. It goes to `out`, if that is given.

        Raises:
            InvalidArgumentError: shapes or types do not fit together.
        """

    def by_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows x [T, heads, n] of each head times its matrix of weight [heads, n, m], [T, heads, m]; types
        are as in `linear`, but compiled products do not round x."""


@cache
def select_dense(device: torch.device, dtype: torch.dtype) -> DenseProducts | None:
    """Return the products with dense weights of type `dtype` on a device, whose rows do not depend on each other; None
    where the library's serve: on GPUs, and for float32, whose bits are to be those of transformers."""
    if device.type != "cpu" or dtype is torch.float32:
        return None
    if importlib.util.find_spec("llvmlite") is not None:
        from nbengine.kernels.cpu.dense import CpuDense, supports_dense

        if supports_dense(dtype):
            products = CpuDense()
            try:
                products.warm_up(dtype, dtype)
            except NBEngineError as error:
                logger.warning("products in %s run through torch in tiles of rows: %s", dtype, error)
            else:
                return products
    from nbengine.kernels.torch.dense import TiledProducts

    return TiledProducts()


_FEW_ROWS, _MANY_ROWS, _WIDE = 8, 64, 2048


@cache
def select_split(device: torch.device) -> DenseProducts | None:
    """Return the products with dense float32 weights in tiles of bfloat16, three to each number, which are as near to
    the exact ones as the library's; None where the processor has no such tiles."""
    if device.type != "cpu" or importlib.util.find_spec("llvmlite") is None:
        return None
    from nbengine.kernels.cpu.dense import CpuDense, has_split_products

    try:
        return CpuDense() if has_split_products() else None
    except NBEngineError as error:
        logger.warning("products in float32 run through torch: %s", error)
        return None


def pays_to_split(rows: int, columns: int) -> bool:
    """Return whether the products of `select_split` take less time than the library's.

    With few rows dividing the weight takes longer than multiplying. Where rows are long, many of them do not stay in
    the second cache, and the library loses less there.
    """
    return rows >= _FEW_ROWS and (columns <= _WIDE or rows <= _MANY_ROWS)
