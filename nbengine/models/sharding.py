"""How a decoder is divided among workers, and which numbers of workers divide it; free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.config import ParallelConfig
from nbengine.distributed.layout import RankLayout
from nbengine.errors import InvalidArgumentError
from nbengine.models.decoder_config import DecoderConfig, decoder_config
from nbengine.models.encoder_config import is_encoder
from nbengine.models.moe_config import MoEConfig


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


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """The part of a layer's experts that one worker holds and computes: `experts`, and of each its `inner` features.

    With expert parallelism they are whole experts, the first workers having one more where they cannot be even; else
    they are a part of every expert, the inner features being divided evenly.
    """

    experts: range
    inner: range

    @classmethod
    def of(cls, moe: MoEConfig, layout: RankLayout) -> ExpertShard:
        """The part of the worker at `layout`; the sizes must pass `check_parallel`."""
        rank, size = layout.expert_rank, layout.expert_size
        if layout.expert_parallel:
            each, more = divmod(moe.num_experts, size)
            first = rank * each + min(rank, more)
            return cls(range(first, first + each + (rank < more)), range(moe.intermediate_size))
        own = moe.intermediate_size // size
        return cls(range(moe.num_experts), range(rank * own, rank * own + own))


def check_parallel(hf_config: Mapping[str, Any], parallel: ParallelConfig) -> None:
    """Check that a model can be divided among so many workers.

    Raises:
        InvalidArgumentError: it cannot; the message has the sizes that work.
        ModelLoadError: the architecture is not supported; not looked at for a worker on its own.
    """
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if parallel.world_size == parallel.data_parallel_size == 1:
        return
    if is_encoder(hf_config):
        if parallel.world_size == 1:
            return
        name, value = (
            ("tensor_parallel_size", tp_size) if tp_size > 1 else ("pipeline_parallel_size", pp_size)
        )
        raise InvalidArgumentError(name, value, "1 (encoders are computed by one worker)")
    config = decoder_config(hf_config)
    if not _divides(tp_size, config):
        sizes = _sizes(config.num_heads, lambda size: _divides(size, config))
        raise InvalidArgumentError(
            "tensor_parallel_size", tp_size, f"{sizes} for this model ({_shape(config)})"
        )
    if pp_size > config.num_layers:
        raise InvalidArgumentError(
            "pipeline_parallel_size",
            pp_size,
            f"at most {config.num_layers}, the number of the model's layers",
        )
    if config.moe is not None:
        _check_experts(config.moe, parallel)


def tensor_parallel_sizes(hf_config: Mapping[str, Any], limit: int) -> list[int]:
    """The numbers of tensor-parallel workers, up to `limit`, that a model can be divided among.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    if is_encoder(hf_config):
        return [1]
    config = decoder_config(hf_config)
    return [size for size in range(1, limit + 1) if _divides(size, config)]


def _check_experts(moe: MoEConfig, parallel: ParallelConfig) -> None:
    """All workers of a stage compute its experts together, those of all engine cores."""
    num_workers = parallel.data_parallel_size * parallel.tensor_parallel_size
    name = "data_parallel_size x tensor_parallel_size"
    if parallel.enable_expert_parallel:
        if num_workers > moe.num_experts:
            raise InvalidArgumentError(
                name, num_workers, f"at most {moe.num_experts}, the number of the model's experts"
            )
    elif moe.intermediate_size % num_workers:
        sizes = _sizes(moe.intermediate_size, lambda size: moe.intermediate_size % size == 0)
        raise InvalidArgumentError(
            name,
            num_workers,
            f"{sizes} for this model (the intermediate size of its experts is {moe.intermediate_size}), or "
            f"enable_expert_parallel be set, with which it may be up to {moe.num_experts}",
        )


def _divides(tp_size: int, config: DecoderConfig) -> bool:
    if math.gcd(config.num_heads, *_inner_sizes(config)) % tp_size:
        return False
    return config.num_kv_heads % tp_size == 0 or tp_size % config.num_kv_heads == 0


def _inner_sizes(config: DecoderConfig) -> list[int]:
    """Inner features of the feed-forward blocks that the ranks of one engine core divide among them."""
    moe = config.moe
    if moe is None:
        return [config.intermediate_size]
    has_dense = not all(map(moe.has_experts, range(config.num_layers)))
    sizes = (config.intermediate_size if has_dense else 0, moe.shared_intermediate_size)
    return [size for size in sizes if size]


def _shape(config: DecoderConfig) -> str:
    heads = f"{config.num_heads} attention heads, {config.num_kv_heads} key-value heads"
    sizes = "".join(f", intermediate size {size}" for size in _inner_sizes(config))
    return heads + sizes


def _sizes(limit: int, works: Callable[[int], bool]) -> str:
    """The numbers up to `limit` that work, as a list in words."""
    return _listed([size for size in range(1, limit + 1) if works(size)])


def _listed(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
