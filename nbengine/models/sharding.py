"""How a decoder is divided among workers, and which numbers of workers divide it; free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.config import ParallelConfig
from nbengine.distributed.layout import RankLayout
from nbengine.errors import InvalidArgumentError
from nbengine.models.decoder_config import DecoderConfig, decoder_config
from nbengine.models.encoder_config import is_encoder


@dataclass(frozen=True, slots=True)
class DecoderShard:
    """The part of a decoder that one rank holds and computes: whole layers, and in each of them some heads.

    Where there are fewer key-value heads than tensor-parallel ranks, several ranks hold the same one.
    """

    layers: range
    num_heads: int
    num_kv_heads: int
    first_kv_head: int

    @classmethod
    def of(cls, config: DecoderConfig, layout: RankLayout) -> DecoderShard:
        """The part of the rank at `layout`; the sizes must pass `check_parallel`."""
        kv_heads = max(1, config.num_kv_heads // layout.tp_size)
        ranks_per_kv_head = max(1, layout.tp_size // config.num_kv_heads)
        return cls(
            layers=layout.stage_layers(config.num_layers),
            num_heads=config.num_heads // layout.tp_size,
            num_kv_heads=kv_heads,
            first_kv_head=layout.tp_rank // ranks_per_kv_head * kv_heads,
        )

    @property
    def num_layers(self) -> int:
        """Layers of the rank's stage."""
        return len(self.layers)


def check_parallel(hf_config: Mapping[str, Any], parallel: ParallelConfig) -> None:
    """Check that a model can be divided among so many workers.

    Raises:
        InvalidArgumentError: it cannot; the message has the sizes that work.
        ModelLoadError: the architecture is not supported; not looked at for a worker on its own.
    """
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if tp_size == pp_size == 1:
        return
    if is_encoder(hf_config):
        name, value = (
            ("tensor_parallel_size", tp_size) if tp_size > 1 else ("pipeline_parallel_size", pp_size)
        )
        raise InvalidArgumentError(name, value, "1 (encoders are computed by one worker)")
    config = decoder_config(hf_config)
    if not _divides(tp_size, config):
        sizes = [size for size in range(1, config.num_heads + 1) if _divides(size, config)]
        raise InvalidArgumentError(
            "tensor_parallel_size",
            tp_size,
            f"{_listed(sizes)} for this model ({config.num_heads} attention heads, {config.num_kv_heads} "
            f"key-value heads, intermediate size {config.intermediate_size})",
        )
    if pp_size > config.num_layers:
        raise InvalidArgumentError(
            "pipeline_parallel_size",
            pp_size,
            f"at most {config.num_layers}, the number of the model's layers",
        )


def _divides(tp_size: int, config: DecoderConfig) -> bool:
    if math.gcd(config.num_heads, config.intermediate_size) % tp_size:
        return False
    return config.num_kv_heads % tp_size == 0 or tp_size % config.num_kv_heads == 0


def _listed(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
