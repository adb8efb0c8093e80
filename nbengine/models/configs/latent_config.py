"""The sizes of latent attention; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.models.configs.hf_config import positive


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The sizes of layers whose keys and values are made from a latent (DeepSeek-V2).

    A layer keeps of a token its latent of `rank` numbers and one key of `rope_dim`, turned by its position, for all
    heads. Of each head the key has `nope_dim` more numbers, which do not turn, and the value `value_dim`. Queries are
    made from a latent of `query_rank` numbers; None: from the hidden states themselves. `bias` is for the projections
    to latents.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None
    bias: bool = False

    @property
    def width(self) -> int:
        """Return the numbers that a layer keeps of a token."""
        return self.rank + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Return the numbers of a head's query, and of its key."""
        return self.nope_dim + self.rope_dim


def latent_of(hf: Mapping[str, Any]) -> LatentConfig:
    """Read the sizes from a Hugging Face configuration.

    Raises:
        ModelLoadError: a size is missing or wrong.
    """
    return LatentConfig(
        rank=positive(hf, "kv_lora_rank"),
        rope_dim=positive(hf, "qk_rope_head_dim"),
        nope_dim=positive(hf, "qk_nope_head_dim"),
        value_dim=positive(hf, "v_head_dim"),
        query_rank=None if hf.get("q_lora_rank") is None else positive(hf, "q_lora_rank"),
        bias=bool(hf.get("attention_bias", False)),
    )
