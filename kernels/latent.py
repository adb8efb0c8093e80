"""Attention over latents: what layers of latent attention keep of a token, and what kernels do with it.

A layer keeps one row a token, which is key and value of all heads at once (DeepSeek-AI, 2024, DeepSeek-V2): a key has
`width` numbers, and the first `rank` of them are the value. Queries are multiplied into that space before attention,
and its results out of it, so that no head has keys or values of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nbengine.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from nbengine.kernels.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class LatentOptions:
    """The options of one layer's causal latent attention: the score of a query and a key is their product times
    `scale`, and the first `rank` numbers of a key are its value.

    Raises:
        InvalidArgumentError: a number is out of its range.
    """

    scale: float
    rank: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise InvalidArgumentError("scale", self.scale, "finite")
        if self.rank < 1:
            raise InvalidArgumentError("rank", self.rank, "at least 1")


class LatentKernels(Protocol):
    """The operations on the paged latents of one layer.

    The cache is one contiguous tensor [1, num_blocks, 1, block_size, width], one row a token.
    """

    def warm_up_latent(self, num_heads: int, width: int, block_size: int, options: LatentOptions) -> None:
        """Compile what layers of this shape need, so that the first step does not wait for it."""

    def write_latent(self, rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows [T, width] at distinct slots, [T] int64, as `Kernels.write_kv` stores keys."""

    def latent_attention(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: LatentOptions,
    ) -> torch.Tensor:
        """Compute causal attention of queries [T, num_heads, width] over their requests' cached rows.

        A request's last query is at position `seq_lens[b] - 1`. Returns [T, num_heads, rank], contiguous, of the
        queries' type. Blocks behind a request's last one are not read.
        """
