"""This module takes GGUF blocks apart into levels and scales, which no arithmetic touches.

Block layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from nbengine.kernels.quantized import FORMATS, Format, Levels


def format_of(kind: GGMLQuantizationType) -> Format | None:
    """Return the format in which weights of a block type stay quantised; None: there is none."""
    return FORMATS.get(kind.name.lower())


def levels_of(raw: Tensor, kind: GGMLQuantizationType, rows: int) -> Levels:
    """Take the blocks of `rows` rows apart; raw is [num_bytes] uint8."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.view(-1, block_bytes)
    levels = torch.empty(blocks.shape[0], block_size, dtype=torch.uint8, device=raw.device)
    scales, *others = _TAKE[kind](blocks, levels)
    minima, supers, super_minima = (part if part is None else part.reshape(rows, -1) for part in others)
    return Levels(levels.view(rows, -1), scales.reshape(rows, -1), minima, supers, super_minima)


Scales = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Scales, minima, and those for 256 columns."""


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Write low nibbles of packed [..., n] to the first half of out [..., 2 n], high nibbles to the
    second."""
    half = packed.shape[-1]
    out[..., :half].copy_(packed & 15)
    out[..., half:].copy_(packed >> 4)


def _fields(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Read packed [..., n] uint8 as one field a shift: [..., len(shifts), n]."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed.unsqueeze(-2) >> by) & mask


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima, each [blocks, 8] uint8, of the eight sub-blocks of Q4_K and Q5_K: 6 bits each
    in 12 bytes."""
    low, high, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 0x3F, (rest & 0x0F) | ((low >> 2) & 0x30)), dim=-1)
    minima = torch.cat((high & 0x3F, (rest >> 4) | ((high >> 2) & 0x30)), dim=-1)
    return scales, minima


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _q4_0(blocks: Tensor, out: Tensor) -> Scales:
    _nibbles(blocks[:, 2:], out)
    return _half(blocks, 0), None, None, None


def _q4_1(blocks: Tensor, out: Tensor) -> Scales:
    _nibbles(blocks[:, 4:], out)
    return _half(blocks, 0), _half(blocks, 2), None, None


def _q5(blocks: Tensor, high: int, out: Tensor) -> None:
    """Write levels to `out`: fifth bits are in 4 bytes at `high`, nibbles behind them."""
    bits = _fields(blocks[:, high : high + 4].unsqueeze(-1), tuple(range(8)), 1).reshape(-1, 32)
    _nibbles(blocks[:, high + 4 :], out)
    out.bitwise_or_(bits << 4)


def _q5_0(blocks: Tensor, out: Tensor) -> Scales:
    _q5(blocks, 2, out)
    return _half(blocks, 0), None, None, None


def _q5_1(blocks: Tensor, out: Tensor) -> Scales:
    _q5(blocks, 4, out)
    return _half(blocks, 0), _half(blocks, 2), None, None


def _q8_0(blocks: Tensor, out: Tensor) -> Scales:
    # Levels are not negative: -128 becomes 0.
    out.copy_(blocks[:, 2:] ^ 0x80)
    return _half(blocks, 0), None, None, None


def _q4_k(blocks: Tensor, out: Tensor) -> Scales:
    _nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 64))
    return _k_parts(blocks)


def _q5_k(blocks: Tensor, out: Tensor) -> Scales:
    _nibbles(blocks[:, 48:].view(-1, 4, 32), out.view(-1, 4, 64))
    out.view(-1, 8, 32).bitwise_or_(_fields(blocks[:, 16:48], tuple(range(8)), 1) << 4)
    return _k_parts(blocks)


def _k_parts(blocks: Tensor) -> Scales:
    scales, minima = _k_scales(blocks)
    return scales.view(torch.int8), minima, _half(blocks, 0), _half(blocks, 2)


def _q6_k(blocks: Tensor, out: Tensor) -> Scales:
    _nibbles(blocks[:, :128].view(-1, 2, 64), out.view(-1, 2, 128))
    high = _fields(blocks[:, 128:192].view(-1, 2, 32), (0, 2, 4, 6), 3)
    out.view(-1, 2, 4, 32).bitwise_or_(high << 4)
    return blocks[:, 192:208].contiguous().view(torch.int8), None, _half(blocks, 208), None


def _mxfp4(blocks: Tensor, out: Tensor) -> Scales:
    _nibbles(blocks[:, 1:], out)
    return blocks[:, :1].contiguous(), None, None, None


_TAKE: dict[GGMLQuantizationType, Callable[[Tensor, Tensor], Scales]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.MXFP4: _mxfp4,
}
