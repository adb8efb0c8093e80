"""The sizes of layers with a recurrent state; free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nbengine.errors import ModelLoadError

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """The sizes of the layers that have the state space of Mamba-2, and the tokens that their short convolution sees.

    Each group of `heads / groups` neighbouring heads has its b and c. A token's step is limited to `least_step` to
    `most_step`. `conv_bias` is for the convolution, `proj_bias` for the projections around it.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    conv_bias: bool = True
    proj_bias: bool = False
    least_step: float = 0.0
    most_step: float = math.inf

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelLoadError(
                f"mamba_n_heads ({self.heads}) must be a multiple of mamba_n_groups ({self.groups})"
            )
        if not 0 <= self.least_step <= self.most_step:
            raise ModelLoadError(
                f"time_step_limit must be two numbers from 0 on in ascending order, got {self.least_step} and "
                f"{self.most_step}"
            )
        check_kernel("mamba_d_conv", self.kernel)

    @property
    def inner(self) -> int:
        """Return the numbers that a token has in all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: x, b and c."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def state_bytes(self) -> int:
        """Return the most bytes that a layer keeps of a request, on all tensor-parallel ranks together."""
        return _FLOAT * (self.channels * (self.kernel - 1) + self.inner * self.state_size)

    def divides(self, tp_size: int) -> bool:
        """Return whether `tp_size` ranks can share the heads, each with whole groups or a part of one."""
        return self.heads % tp_size == 0 and (self.groups % tp_size == 0 or tp_size % self.groups == 0)


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """The sizes of the layers that have a short convolution between gates (LFM2): it sees `kernel` tokens. `bias` is
    for it and for the projections around it."""

    channels: int
    kernel: int
    bias: bool = False

    def __post_init__(self) -> None:
        check_kernel("conv_L_cache", self.kernel)

    @property
    def state_bytes(self) -> int:
        """Return the most bytes that a layer keeps of a request, on all tensor-parallel ranks together."""
        return _FLOAT * self.channels * (self.kernel - 1)

    def divides(self, tp_size: int) -> bool:
        """Return whether `tp_size` ranks can share the channels."""
        return self.channels % tp_size == 0


def check_kernel(name: str, kernel: int) -> None:
    """Refuse a convolution that sees one token alone.

    Raises:
        ModelLoadError: it does.
    """
    if kernel < 2:
        raise ModelLoadError(f"{name} must be at least 2, got {kernel}")
