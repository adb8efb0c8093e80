"""From GGUF blocks to float32 values, with torch operations on whichever device the bytes are.

The types that files are commonly made of have their own vectorised code here, bit for bit equal to the
reference in the `gguf` package; that reference itself, on the CPU, serves the others. Block layouts: ggml's
ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf.quants
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from nbengine.errors import ModelLoadError

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


def dequantize(raw: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Values, flat, of the blocks in raw [num_bytes] uint8: float32, or the type of an unquantised tensor.

    Raises:
        ModelLoadError: there is no dequantisation of this type.
    """
    plain = _PLAIN.get(kind)
    if plain is not None:
        return raw.view(plain)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.view(-1, block_bytes)
    unpack = _UNPACK.get(kind)
    if unpack is None:
        return _reference(blocks, kind)
    out = torch.empty(blocks.shape[0], block_size, dtype=torch.float32, device=raw.device)
    unpack(blocks, out)
    return out.view(-1)


def _reference(blocks: Tensor, kind: GGMLQuantizationType) -> Tensor:
    try:
        values = gguf.quants.dequantize(blocks.cpu().numpy(), kind)
    except NotImplementedError as error:
        raise ModelLoadError(f"tensors of ggml type {kind.name} cannot be dequantised") from error
    return torch.from_numpy(values).view(-1).to(blocks.device)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, [blocks, 1] float32."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low nibbles of packed [..., n] go to the first half of out [..., 2 n], high nibbles to the second."""
    half = packed.shape[-1]
    out[..., :half].copy_(packed & 15)
    out[..., half:].copy_(packed >> 4)


def _fields(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """packed [..., n] uint8 read as one field a shift: [..., len(shifts), n]."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed.unsqueeze(-2) >> by) & mask


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5(blocks: Tensor, high: int, out: Tensor) -> None:
    """Values 0 to 31 of the 5-bit types: fifth bits in 4 bytes at `high`, nibbles behind them."""
    bits = _fields(blocks[:, high : high + 4].unsqueeze(-1), tuple(range(8)), 1).reshape(-1, 32)
    _nibbles(blocks[:, high + 4 :], out)
    out.add_(bits << 4)


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _q5(blocks, 2, out)
    out.sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _q5(blocks, 4, out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima, each [blocks, 8, 1], of the eight sub-blocks of Q4_K and Q5_K: 6 bits each in 12 bytes."""
    low, high, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 0x3F, (rest & 0x0F) | ((low >> 2) & 0x30)), dim=-1)
    minima = torch.cat((high & 0x3F, (rest >> 4) | ((high >> 2) & 0x30)), dim=-1)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _k_scales(blocks)
    _nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 64))
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _k_scales(blocks)
    high = _fields(blocks[:, 16:48], tuple(range(8)), 1)
    _nibbles(blocks[:, 48:].view(-1, 4, 32), out.view(-1, 4, 64))
    out.view(-1, 8, 32).add_(high << 4).mul_(scales).sub_(minima)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    high = _fields(blocks[:, 128:192].view(-1, 2, 32), (0, 2, 4, 6), 3)
    _nibbles(blocks[:, :128].view(-1, 2, 64), out.view(-1, 2, 128))
    out.view(-1, 2, 4, 32).add_(high << 4).sub_(32)
    out.view(-1, 16, 16).mul_(scales[..., None])


_UNPACK: dict[GGMLQuantizationType, Callable[[Tensor, Tensor], None]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
