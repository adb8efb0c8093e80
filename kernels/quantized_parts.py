"""Packed weights are cut into parts and joined again; the bits are those of the part's own packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from nbengine.kernels.quantized import LANES, Format, Levels, pack, unpack


def cut(form: Format, data: Tensor, rows: int, dim: int, kept: range) -> Tensor:
    """Return the part of a packed weight that has, along the dimension `dim`, the rows or columns `kept`, which
    it may share memory with. `rows` are all that the weight has; columns begin and end with a cell."""
    if dim == 1:
        return data[:, kept.start // form.columns : kept.stop // form.columns]
    if kept.start % LANES == 0 and (kept.stop == rows or len(kept) % LANES == 0):
        return data[kept.start // LANES : -(-kept.stop // LANES)]
    return pack(form, _each(lambda part: part[kept.start : kept.stop], [unpack(form, data, rows)]))


def join(form: Format, parts: Sequence[Tensor], rows: int, dim: int) -> Tensor:
    """Return the weight whose packed parts, of `rows` rows each, follow one another along the dimension
    `dim`."""
    if len(parts) == 1:
        return parts[0]
    if dim == 1 or rows % LANES == 0:
        return torch.cat(tuple(parts), dim=dim)
    return pack(form, _each(lambda *found: torch.cat(found), [unpack(form, part, rows) for part in parts]))


def _each(make: Callable[..., Tensor], weights: Sequence[Levels]) -> Levels:
    """Make each tensor of a weight of the same tensors of several weights."""
    by_field = [[getattr(weight, field.name) for weight in weights] for field in fields(Levels)]
    return Levels(*(None if found[0] is None else make(*found) for found in by_field))  # type: ignore[arg-type]
