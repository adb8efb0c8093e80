"""Rotary position embedding (Su et al., 2021): pairs of a head's dimensions turn by angles that grow with the
position."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.kernels.row_kernels import select_rotation
from nbengine.models.configs.rope_config import Rope, RopeScaling

_MAX_TABLE_BYTES = 1 << 30
_CHUNK = 1 << 16
"""The number of positions whose angles are computed at a time, which bounds the temporary memory."""


class RotaryEmbedding:
    """The cosines and sines of every position up to `max_positions`, computed in float32, kept in `dtype`,
    which is that of the heads. `is_exact`: the bits are to be those of transformers.

    Of each head the first `size` dimensions turn, the first half of them with the second half, or each with its
    neighbour if `is_interleaved`. Each row holds the cosines of both dimensions of a pair, and the sines, that of the
    first negated: rotating is then `x * cos + partner(x) * sin`.
    """

    def __init__(
        self,
        rope: Rope,
        size: int,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        is_exact: bool,
        is_interleaved: bool = False,
    ) -> None:
        shape = (max_positions, 2, 1, size)
        if math.prod(shape) * dtype.itemsize > _MAX_TABLE_BYTES:
            raise ModelLoadError(
                f"the RoPE table of {max_positions} positions (max_position_embeddings) would take more than "
                f"{_MAX_TABLE_BYTES >> 30} GiB; set max_model_len"
            )
        self.max_positions = max_positions
        self.is_interleaved = is_interleaved
        self.size = size
        self._table = torch.empty(shape, dtype=dtype, device=device)
        self._half = size // 2
        self._is_exact = is_exact
        self._compiled: dict[int, Callable[[Tensor, Tensor], Tensor] | None] = {}
        """The compiled rotations, by the number of heads."""
        # On "meta" there is nothing to compute, and trying would make torch import its compiler, for a
        # second.
        if device.type != "meta":
            frequencies = inverse_frequencies(rope, size, max_positions, device)
            factor = 1.0 if rope.scaling is None else rope.scaling.attention_factor
            for start in range(0, max_positions, _CHUNK):
                rows = self._table[start : start + _CHUNK, :, 0]
                _fill(rows, start, frequencies, factor, is_interleaved=is_interleaved)

    @property
    def table(self) -> Tensor:
        """Return what `at` gives for all positions, contiguous."""
        return self._table

    def at(self, positions: Tensor) -> Tensor:
        """Return cosines and signed sines, [T, 2, 1, size], at positions [T] int64."""
        return self._table.index_select(0, positions)

    def warm_up(self, heads: int) -> None:
        """Compile what turns this number of heads as a whole."""
        self._compiled[heads] = None
        if not (self._is_exact or self.is_interleaved):
            table = self._table
            self._compiled[heads] = select_rotation(table.device, table.dtype, heads, self.size)

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Turn the heads x [T, heads, head_dim] by the angles that `at` gave; the result is a new tensor."""
        _, heads, head_dim = x.shape
        if head_dim != self.size:
            turned, kept = x.split_with_sizes((self.size, head_dim - self.size), dim=2)
            return torch.cat((self._turn(turned, angles), kept), dim=2)
        if heads not in self._compiled:
            self.warm_up(heads)
        if (compiled := self._compiled[heads]) is not None:
            return compiled(x, angles)
        return self._turn(x, angles)

    def _turn(self, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.unbind(1)
        if self.is_interleaved:
            partner = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            partner = x.roll(self._half, -1)
        return (x * cos).add_(partner.mul_(sin))


def _fill(rows: Tensor, start: int, frequencies: Tensor, factor: float, *, is_interleaved: bool) -> None:
    positions = torch.arange(start, start + len(rows), dtype=torch.float32, device=rows.device)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if is_interleaved:
        rows[:, 0] = cos.repeat_interleave(2, dim=-1)
        rows[:, 1] = torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        rows[:, 0] = torch.cat((cos, cos), dim=-1)
        rows[:, 1] = torch.cat((-sin, sin), dim=-1)


def inverse_frequencies(rope: Rope, size: int, num_positions: int, device: torch.device) -> Tensor:
    """Return the angle per position of each of the pairs of `size` dimensions, [size / 2] float32, with the
    scaling for sequences of up to `num_positions` tokens applied."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    plain = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return plain
    match scaling.kind:
        case "linear":
            return plain / scaling.factor
        case "proportional":
            plain[int(scaling.part * size // 2) :] = 0.0
            return plain / scaling.factor
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, scaling, size, rope.theta)
        case "dynamic":
            return 1.0 / (_dynamic_base(rope.theta, scaling, size, num_positions) ** exponents)
        case "longrope" if num_positions > scaling.original_max_position_embeddings:
            given = scaling.long_factors
        case _:
            given = scaling.frequency_factors
    factors = torch.tensor(given, dtype=torch.float32, device=device)
    if factors.shape != plain.shape:
        raise ModelLoadError(f"{factors.numel()} RoPE frequency factors for {plain.numel()} frequencies")
    return 1.0 / (factors * rope.theta**exponents)


def _dynamic_base(theta: float, scaling: RopeScaling, size: int, num_positions: int) -> float:
    """Return the base for sequences of up to `num_positions` tokens ("NTK-aware" scaling)."""
    times = max(num_positions / scaling.original_max_position_embeddings, 1.0)
    return float(theta * (scaling.factor * times - (scaling.factor - 1)) ** (size / (size - 2)))


def _yarn(plain: Tensor, scaling: RopeScaling, size: int, theta: float) -> Tensor:
    """Scale frequencies as YaRN: those of many turns in the original context are kept, those of few divided by the
    factor, those between blended, by their places."""

    def place(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(scaling.high_freq_factor), place(scaling.low_freq_factor)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    spread = last - first or 0.001
    places = torch.arange(size // 2, dtype=torch.float32, device=plain.device)
    divided = ((places - first) / spread).clamp_(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale frequencies as Llama 3.1: long wavelengths are divided by the factor, short ones kept, those
    between blended."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    keep = (context / wavelengths - scaling.low_freq_factor) / spread
    blended = (1 - keep) * plain / scaling.factor + keep * plain
    is_long = wavelengths > context / scaling.low_freq_factor
    is_short = wavelengths < context / scaling.high_freq_factor
    return torch.where(is_long, plain / scaling.factor, torch.where(is_short, plain, blended))
