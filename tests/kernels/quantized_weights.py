"""Random weights in every format."""

from __future__ import annotations

import torch

from nbengine.kernels.quantized import FORMATS, ZERO_POINTS, Format, Levels

ALL_FORMATS = {**FORMATS, **{form.name: form for form in ZERO_POINTS.values()}}
FORMAT_NAMES = sorted(ALL_FORMATS)


def random_parts(form: Format, rows: int, columns: int, seed: int) -> Levels:
    """Parts with every level, and scales and minima of both signs where the format has them."""
    chance = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 2**form.bits, (rows, columns), dtype=torch.uint8, generator=chance)
    groups = (rows, columns // form.group)
    if form.is_micro:
        return Levels(levels, torch.randint(120, 132, groups, dtype=torch.uint8, generator=chance))
    if not form.is_super:
        scales = torch.randn(groups, generator=chance).half()
        if form.has_zero:
            zeros = torch.randint(0, 2**form.bits, groups, dtype=torch.uint8, generator=chance)
            return Levels(levels, scales, zeros)
        return Levels(
            levels, scales, torch.randn(groups, generator=chance).half() if form.has_minimum else None
        )
    # Six bits in those with minima, eight and a sign in the other.
    low, high = (0, 64) if form.has_minimum else (-128, 128)
    scales = torch.randint(low, high, groups, generator=chance).to(torch.int8)
    supers = torch.randn((rows, columns // 256), generator=chance).half() / 64
    if not form.has_minimum:
        return Levels(levels, scales, None, supers)
    minima = torch.randint(0, 64, groups, generator=chance).to(torch.uint8)
    return Levels(levels, scales, minima, supers, torch.randn(supers.shape, generator=chance).half() / 64)


def rounded(x: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """The values that products take for x [rows, columns]: spans of 32, each a scale times integers to 127, or to
    127 * 256 with 16 bits, whose second byte is not -128."""
    most = {8: 127, 16: 127 * 256}[bits]
    spans = x.float().view(len(x), -1, 32)
    largest = spans.abs().amax(-1, keepdim=True)
    factor = torch.where(largest == 0, 0, torch.full_like(largest, most) / largest)
    integers = torch.round(spans * factor).double()
    if bits == 16:
        integers[(integers + 128) % 256 == 0] += 1
    return (integers * (largest / most).double()).view(x.shape)
