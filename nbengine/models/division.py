"""The numbers of workers among which a model can be divided; free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from nbengine.config import ParallelConfig
from nbengine.errors import InvalidArgumentError
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.encoder_config import is_encoder
from nbengine.models.configs.moe_config import MoEConfig
from nbengine.models.registry import decoder_config


def check_parallel(hf_config: Mapping[str, Any], parallel: ParallelConfig) -> None:
    """Check that a model can be divided among the configured number of workers.

    Raises:
        InvalidArgumentError: the model cannot be divided; the message has the sizes that work.
        ModelLoadError: the architecture is not supported; it is not looked at for a worker without others.
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
    if pp_size > 1 and (config.layer_inputs or any(layer.source is not None for layer in config.layers)):
        allowed = "1 for this model: its layers take what only the first stage has, or keys of other layers"
        raise InvalidArgumentError("pipeline_parallel_size", pp_size, allowed)
    if pp_size > config.num_layers:
        raise InvalidArgumentError(
            "pipeline_parallel_size",
            pp_size,
            f"at most {config.num_layers}, the number of the model's layers",
        )
    if config.moe is not None:
        _check_experts(config.moe, parallel)


def tensor_parallel_sizes(hf_config: Mapping[str, Any], limit: int) -> list[int]:
    """List the numbers of tensor-parallel workers, up to `limit`, among which a model can be divided.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    if is_encoder(hf_config):
        return [1]
    config = decoder_config(hf_config)
    return [size for size in range(1, limit + 1) if _divides(size, config)]


def _check_experts(moe: MoEConfig, parallel: ParallelConfig) -> None:
    """Check the number of workers that compute the experts of a stage together, those of all engine cores."""
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
    recurrent_heads = [config.delta_rule.key_heads] if config.delta_rule is not None else []
    if math.gcd(config.num_heads, *recurrent_heads, *_inner_sizes(config)) % tp_size:
        return False
    if not all(sizes is None or sizes.divides(tp_size) for sizes in (config.mamba2, config.short_conv)):
        return False
    kv_heads = {config.of_layer(index).num_kv_heads for index in range(config.num_layers)}
    return all(heads % tp_size == 0 or tp_size % heads == 0 for heads in kv_heads)


def _inner_sizes(config: DecoderConfig) -> list[int]:
    """List the inner features of the feed-forward blocks that the ranks of one engine core divide among
    them."""
    moe = config.moe
    if moe is None:
        return [config.intermediate_size] if config.intermediate_size else []
    has_dense = moe.beside_dense or not all(map(moe.has_experts, range(config.num_layers)))
    sizes = (config.intermediate_size if has_dense else 0, moe.shared_intermediate_size)
    return [size for size in sizes if size]


def _shape(config: DecoderConfig) -> str:
    heads = f"{config.num_heads} attention heads, {config.num_kv_heads} key-value heads"
    if config.delta_rule is not None:
        heads += f", {config.delta_rule.key_heads} key heads in recurrent layers"
    if config.mamba2 is not None:
        heads += f", {config.mamba2.heads} heads in {config.mamba2.groups} groups in recurrent layers"
    if config.short_conv is not None:
        heads += f", {config.short_conv.channels} channels in recurrent layers"
    sizes = "".join(f", intermediate size {size}" for size in _inner_sizes(config))
    return heads + sizes


def _sizes(limit: int, works: Callable[[int], bool]) -> str:
    """List the numbers up to `limit` that work, in words."""
    return _listed([size for size in range(1, limit + 1) if works(size)])


def _listed(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
