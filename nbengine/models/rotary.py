"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.models.decoder_config import DecoderConfig, RopeScaling

_MAX_TABLE_BYTES = 1 << 30
_CHUNK = 1 << 16
"""Positions whose angles are computed at a time, which bounds the temporary memory."""


class RotaryEmbedding:
    """Cosines and sines of every position up to `max_positions`, computed in float32, kept in `dtype`.

    Both halves of a head turn by the same angles, so each row holds its cosines twice, and its sines twice
    with the first half negated: rotating is then `x * cos + roll(x) * sin`.
    """

    def __init__(
        self, config: DecoderConfig, *, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (max_positions, 2, 1, config.head_dim)
        if math.prod(shape) * dtype.itemsize > _MAX_TABLE_BYTES:
            raise ModelLoadError(
                f"the RoPE table of {max_positions} positions (max_position_embeddings) would take more than "
                f"{_MAX_TABLE_BYTES >> 30} GiB; set max_model_len"
            )
        self._table = torch.empty(shape, dtype=dtype, device=device)
        self._half = config.head_dim // 2
        # On "meta" there is nothing to compute, and trying would make torch import its compiler, for a second.
        if device.type != "meta":
            frequencies = inverse_frequencies(config, device)
            for start in range(0, max_positions, _CHUNK):
                _fill(self._table[start : start + _CHUNK, :, 0], start, frequencies)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, each [T, 1, head_dim], at positions [T] int64."""
        cos, sin = self._table.index_select(0, positions).unbind(1)
        return cos, sin

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn the heads x [T, heads, head_dim] by the angles that `at` gave; the result is a new tensor."""
        return (x * cos).add_(x.roll(self._half, -1).mul_(sin))


def _fill(rows: Tensor, start: int, frequencies: Tensor) -> None:
    positions = torch.arange(start, start + len(rows), dtype=torch.float32, device=rows.device)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    rows[:, 0] = torch.cat((cos, cos), dim=-1)
    rows[:, 1] = torch.cat((-sin, sin), dim=-1)


def inverse_frequencies(config: DecoderConfig, device: torch.device) -> Tensor:
    """Angle per position of each pair of dimensions, [head_dim / 2] float32, with the scaling applied."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    factors = torch.tensor(scaling.frequency_factors, dtype=torch.float32, device=device)
    if factors.shape != plain.shape:
        raise ModelLoadError(f"{factors.numel()} RoPE frequency factors for {plain.numel()} frequencies")
    return plain / factors


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    keep = (context / wavelengths - scaling.low_freq_factor) / spread
    blended = (1 - keep) * plain / scaling.factor + keep * plain
    is_long = wavelengths > context / scaling.low_freq_factor
    is_short = wavelengths < context / scaling.high_freq_factor
    return torch.where(is_long, plain / scaling.factor, torch.where(is_short, plain, blended))
