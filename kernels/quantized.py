"""Weights at their own size: a few bits a value, and scales for groups of values.

The layouts hold what GGUF's block types hold (ggml-common.h in ggml's repository), bit for bit and at most 3 %
larger, the levels, scales and zero points of AWQ and GPTQ, and MXFP4 (Open Compute Project, Microscaling Formats),
in the order in which a product with few rows reads it. A weight [rows, columns] is cut into *tiles*
of 16 rows, one for each lane of a vector, and a tile into *cells* of `Format.columns` columns: the bits of
the cell's values first, then its scales. Nothing is rounded when blocks are packed.

The bits of 32 columns of a tile lie in vectors of 64 bytes. Byte 4 r + b of a vector belongs to row r, and to
one or more columns 4 q + b; q numbers the *quads* of columns, 0 to 7. So a vector of the products' operands
is a quad: 4 neighbouring columns of 16 rows, in 16 words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 16
"""Rows of a tile."""
SPAN = 32
"""Columns whose bits lie together, and that share an activation's scale."""
QUADS = SPAN // 4
PLANE = 4 * LANES
"""Bytes of one vector of bits."""


@dataclass(frozen=True, slots=True)
class Format:
    """The way in which the values of a weight are held: value = scale * (level - offset) + minimum.

    `has_minimum`: each group has a minimum, else it is 0. `is_super`: the scale of a group is a small integer
    times a scale for 256 columns (its minimum, too, negated); else it is a float16. `has_zero`: the minimum of a
    group is its zero point, an integer from 0 to 255, times its scale, negated; else it is a float16. `is_micro`: the
    bits are the number of a level in `MICRO_LEVELS`, and a scale is a power of two, 2**(byte - 128).
    """

    name: str
    bits: int
    offset: int
    has_minimum: bool = False
    is_super: bool = False
    has_zero: bool = False
    is_micro: bool = False
    group: int = SPAN
    """Columns with one scale."""

    @property
    def largest(self) -> int:
        """Return the largest level."""
        return max(MICRO_LEVELS) if self.is_micro else 2**self.bits - 1

    @property
    def columns(self) -> int:
        """Return the columns of a cell."""
        return 256 if self.is_super else SPAN

    @property
    def spans(self) -> int:
        """Return the spans of 32 columns in a cell."""
        return self.columns // SPAN

    @property
    def span_bytes(self) -> int:
        """Return the bytes of the bits of one span of a tile."""
        return self.bits * SPAN * LANES // 8

    @property
    def scales_at(self) -> int:
        """Return the place of the scales in a cell, in bytes."""
        return self.spans * self.span_bytes

    @property
    def minima_at(self) -> int:
        """Return the place of the minima in a cell, in bytes."""
        return self.scales_at + self.columns // self.group * LANES * self.scale_type.itemsize

    @property
    def supers_at(self) -> int:
        """Return the place of the scales for 256 columns in a cell (float16, then those of the minima)."""
        return self.minima_at + (self.spans * LANES if self.has_minimum else 0)

    @property
    def cell_bytes(self) -> int:
        """Return the bytes of a cell."""
        if self.is_super:
            return self.supers_at + (2 if self.has_minimum else 1) * 2 * LANES
        minima = self.minimum_type.itemsize if self.has_minimum else 0
        return self.minima_at + minima * LANES

    @property
    def scale_type(self) -> torch.dtype:
        """Return the type in which the scales of groups are held."""
        if self.is_micro:
            return torch.uint8
        return torch.int8 if self.is_super else torch.float16

    @property
    def minimum_type(self) -> torch.dtype:
        """Return the type in which minima are held."""
        return torch.uint8 if self.is_super or self.has_zero else torch.float16

    def data_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Return the shape (tiles, cells, bytes of a cell) of a packed weight; `columns` fill whole cells."""
        return -(-rows // LANES), columns // self.columns, self.cell_bytes


FORMATS: Mapping[str, Format] = {
    made.name: made
    for made in (
        Format("q4_0", 4, 8),
        Format("q4_1", 4, 0, has_minimum=True),
        Format("q5_0", 5, 16),
        Format("q5_1", 5, 0, has_minimum=True),
        Format("q8_0", 8, 128),
        Format("q4_k", 4, 0, has_minimum=True, is_super=True),
        Format("q5_k", 5, 0, has_minimum=True, is_super=True),
        Format("q6_k", 6, 32, is_super=True, group=16),
        Format("mxfp4", 4, 12, is_micro=True),
    )
}
"""The formats, by the names of GGUF's block types."""
ZERO_POINTS: Mapping[int, Format] = {
    bits: Format(f"q{bits}_z", bits, 0, has_minimum=True, has_zero=True) for bits in (4, 8)
}
"""The formats of levels with a scale and a zero point, by their bits a level."""


NO_NUMBER = 0xFF
"""The byte of a scale of MXFP4 that stands for what is no number."""
MICRO_LEVELS = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""The levels of floating-point numbers with a sign, two bits of exponent and one of mantissa, by their bits: 12 more
than twice the number."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The parts of a weight [rows, columns].

    `levels` [rows, columns] are uint8, below 2**bits. `scales` [rows, columns / group] are float16, or with
    `is_super` int8, with `is_micro` uint8; `minima`, if any, have the same shape, float16, or uint8 with `is_super` and `has_zero`. `supers` [rows, columns / 256]
    are float16, `super_minima` too.
    """

    levels: Tensor
    scales: Tensor
    minima: Tensor | None = None
    supers: Tensor | None = None
    super_minima: Tensor | None = None


def pack(form: Format, parts: Levels) -> Tensor:
    """Return the packed weight, [tiles, cells, bytes] uint8; the rows of a last tile that are not there are
    0."""
    rows, columns = parts.levels.shape
    tiles, cells, _ = form.data_shape(rows, columns)
    levels = _tiled(parts.levels, tiles)
    quads = levels.view(tiles, LANES, cells * form.spans, QUADS, 4).permute(0, 2, 3, 1, 4)
    bits = torch.cat(_planes(form.bits, quads), dim=2).reshape(tiles, cells, -1)
    held = [parts.scales, parts.minima, parts.supers, parts.super_minima]
    by_row = [_lanes_last(part, tiles, cells) for part in held if part is not None]
    return torch.cat((bits, *by_row), dim=2).contiguous()


def unpack(form: Format, data: Tensor, rows: int) -> Levels:
    """Return the parts of a packed weight; the reverse of `pack`."""
    tiles, cells, _ = data.shape
    bits = data[:, :, : form.scales_at].reshape(tiles, cells * form.spans, -1, PLANE)
    levels = _levels(form.bits, bits).view(tiles, -1, QUADS, LANES, 4).permute(0, 3, 1, 2, 4)
    columns = cells * form.columns

    def part(start: int, kind: torch.dtype, each: int) -> Tensor:
        count = form.columns // each
        size = count * LANES * kind.itemsize
        found = data[:, :, start : start + size].contiguous().view(kind).view(tiles, cells, count, LANES)
        return found.permute(0, 3, 1, 2).reshape(tiles * LANES, -1)[:rows]

    half = torch.float16
    minima = supers = super_minima = None
    if form.has_minimum:
        minima = part(form.minima_at, form.minimum_type, form.group)
    if form.is_super:
        supers = part(form.supers_at, half, form.columns)
        if form.has_minimum:
            super_minima = part(form.supers_at + 2 * LANES, half, form.columns)
    return Levels(
        levels.reshape(tiles * LANES, columns)[:rows],
        part(form.scales_at, form.scale_type, form.group),
        minima,
        supers,
        super_minima,
    )


def dense(form: Format, data: Tensor, rows: int) -> Tensor:
    """Return the packed weight [rows, columns] in float32."""
    return values(form, unpack(form, data, rows))


def values(form: Format, parts: Levels) -> Tensor:
    """Return what the parts of a weight stand for, [rows, columns] in float32."""
    scales = power_of_two(parts.scales) if form.is_micro else parts.scales.float()
    minima = None if parts.minima is None else parts.minima.float()
    if parts.supers is not None:
        scales = _times(scales, parts.supers)
        if minima is not None and parts.super_minima is not None:
            minima = _times(minima, parts.super_minima).neg_()
    if minima is not None and form.has_zero:
        minima = (minima * scales).neg_()
    found = parts.levels.to(torch.float32, memory_format=torch.contiguous_format)
    if form.is_micro:
        found = torch.tensor(MICRO_LEVELS, dtype=torch.float32, device=found.device)[parts.levels.int()]
    groups = found.view(*scales.shape, -1)
    if form.offset:
        groups.sub_(form.offset)
    groups.mul_(scales[..., None])
    if minima is not None:
        groups.add_(minima[..., None])
    return found


def power_of_two(scales: Tensor) -> Tensor:
    """Return 2**(byte - 128) in float32, exactly, for the bytes of scales."""
    bits = scales.int()
    # The two least are no normal numbers.
    return torch.where(bits < 2, (1 << 21) << bits.clamp(max=1), (bits - 1) << 23).view(torch.float32)


def _times(small: Tensor, supers: Tensor) -> Tensor:
    """Multiply the small integers of groups [rows, n] with the scales of 256 columns [rows, m]."""
    return (small.view(*supers.shape, -1) * supers.float()[..., None]).view(small.shape)


def _tiled(part: Tensor, tiles: int) -> Tensor:
    """Add rows of 0 until whole tiles are there."""
    missing = tiles * LANES - part.shape[0]
    return torch.cat((part, part.new_zeros(missing, part.shape[1]))) if missing else part


def _lanes_last(part: Tensor, tiles: int, cells: int) -> Tensor:
    """Return the bytes of scales [rows, groups], by tile and cell, all rows of a group together."""
    found = _tiled(part, tiles).view(tiles, LANES, cells, -1).permute(0, 2, 3, 1).contiguous()
    return found.view(torch.uint8).view(tiles, cells, -1)


def _planes(bits: int, quads: Tensor) -> list[Tensor]:
    """Return the vectors of bits, each [tiles, spans, n, 16, 4], of quads [tiles, spans, 8, 16, 4]."""
    if bits == 8:
        return [quads]
    planes = [(quads[:, :, :4] & 15) | (quads[:, :, 4:] << 4)]
    high = quads >> 4
    if bits == 5:
        planes.append(_joined(high, 1))
    if bits == 6:
        planes += [_joined(high[:, :, :4], 2), _joined(high[:, :, 4:], 2)]
    return planes


def _joined(fields: Tensor, width: int) -> Tensor:
    """Join fields [tiles, spans, n, 16, 4] of `width` bits to bytes [tiles, spans, 1, 16, 4], the first one
    lowest."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=fields.device).view(-1, 1, 1)
    return (fields << shifts).sum(dim=2, keepdim=True, dtype=torch.uint8)


def _levels(bits: int, planes: Tensor) -> Tensor:
    """Return quads [tiles, spans, 8, 64] of vectors of bits [tiles, spans, n, 64]."""
    if bits == 8:
        return planes
    low = torch.cat((planes[:, :, :4] & 15, planes[:, :, :4] >> 4), dim=2)
    if bits == 4:
        return low
    width = bits - 4
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=planes.device).view(-1, 1)
    high = (planes[:, :, 4:, None] >> shifts) & (2**width - 1)
    quads: Tensor = low | (high.flatten(2, 3) << 4)
    return quads
