"""Products with dense 16-bit weights in plain torch: rows in tiles of one size, whatever their number."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_TILES = (32, 8)
"""The sizes that are tried; one row at a time always holds."""
_SHAPES = ((96, 64), (576, 576), (576, 1536), (2048, 1024))
"""The weights with which a size is tried."""
_SHIFTS = (1, 3)


class TiledProducts:
    """See `nbengine.kernels.dense_kernels.DenseProducts`.

    The library chooses an order of summation by the number of rows. It is the same for all tiles, which have one
    number of rows, padded with zeros; that a row's place in its tile does not matter is tried out once a process.
    """

    name = "torch"
    are_compiled = False

    @property
    def instructions(self) -> str:
        """Return a name for what is the library's choice."""
        return "torch"

    def warm_up(self, dtype: torch.dtype, hidden_dtype: torch.dtype) -> None:
        """Find the size of the tiles."""
        del hidden_dtype
        tile_rows(dtype)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `nbengine.kernels.dense_kernels.DenseProducts.linear`; x and a result in float32 are rounded to the
        weight's type, float16, too."""
        added = bias if bias is None or bias.dtype is weight.dtype else bias.to(weight.dtype)
        rows = _padded(x.to(weight.dtype), tile_rows(weight.dtype))
        found = [F.linear(tile, weight, added) for tile in torch.split(rows, tile_rows(weight.dtype))]
        result = (torch.cat(found) if found else x.new_empty(0, len(weight)))[: len(x)].to(x.dtype)
        return result if out is None else out.copy_(result)

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `nbengine.kernels.dense_kernels.DenseProducts.by_head`."""
        size = tile_rows(weight.dtype)
        rows = _padded(x.to(weight.dtype), size)
        found = [torch.bmm(tile.transpose(0, 1), weight) for tile in torch.split(rows, size)]
        return torch.cat(found, dim=1)[:, : len(x)].transpose(0, 1).to(x.dtype)


def _padded(rows: Tensor, size: int) -> Tensor:
    missing = -len(rows) % size
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows.contiguous()


@cache
def tile_rows(dtype: torch.dtype) -> int:
    """Return the largest number of rows at which a product's rows do not depend on their places, on this machine."""
    generator = torch.Generator().manual_seed(0)
    for size in _TILES:
        if all(_is_even(size, dtype, shape, generator) for shape in _SHAPES):
            return size
    return 1


def _is_even(size: int, dtype: torch.dtype, shape: tuple[int, int], generator: torch.Generator) -> bool:
    weight = torch.randn(shape, generator=generator).to(dtype)
    rows = torch.randn(size, shape[1], generator=generator).to(dtype)
    expected = F.linear(rows, weight)
    moved = (F.linear(rows.roll(shift, 0), weight).roll(-shift, 0) for shift in _SHIFTS)
    alone = torch.zeros_like(rows)
    alone[0] = rows[0]
    return all(torch.equal(found, expected) for found in moved) and torch.equal(
        F.linear(alone, weight)[0], expected[0]
    )
