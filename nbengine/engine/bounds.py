"""The bounds on what an engine may ask of a machine, checked before it is started or scaled. Free of torch.

The needs computed here are the least that can be told without loading anything, so that nothing is refused
that would have worked; the engine's workers check again, with the exact numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbengine.config import EngineConfig, ParallelConfig
from nbengine.config.model import ROUNDINGS
from nbengine.errors import InvalidArgumentError, ModelLoadError, NBEngineError
from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups, make_groups
from nbengine.models.configs.encoder_config import is_encoder
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.registry import decoder_config, is_registered
from nbengine.runtime.capacity import Capacity
from nbengine.units import size
from nbengine.worker.memory.limits import check_kv_cache_fits, check_weights_fit

MAX_REMOTE = 1024
"""Most engine cores, and most workers of one engine core, that an engine may have on a Ray cluster. The
cluster decides within `ray_timeout` whether it has room for them."""
TORCH_PROCESS_BYTES = 128 << 20
"""The least memory that a process with torch has to itself; an engine core of a tiny model has 168 MiB."""
_CERTAIN_SHARE = 0.75
"""Share of a checkpoint's bytes that is loaded at least: it may have tensors that are not."""
_DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
_TOKEN_BYTES = 4


def check_counts(config: EngineConfig, capacity: Capacity) -> None:
    """Check that the numbers of engine cores and workers are possible here.

    Raises:
        InvalidArgumentError: a number is too large; the message has the largest that is possible.
    """
    parallel = config.parallel
    if parallel.data_parallel_backend == "ray":
        _check_at_most("data_parallel_size", parallel.data_parallel_size, MAX_REMOTE, "on a Ray cluster", "")
    if parallel.distributed_executor_backend == "ray":
        _check_workers(parallel, MAX_REMOTE, "on a Ray cluster", "")
    limit, why = capacity.process_limit()
    of_core = _processes_of_core(parallel)
    if of_core > 1:
        _check_workers(parallel, limit - 1, "here", f": {why}, and the engine core is one of them")
    workers = f", and an engine core has {of_core} of them with its workers" if of_core > 1 else ""
    _check_at_most(
        "data_parallel_size", _num_cores_here(parallel), max(1, limit // of_core), "here", f": {why}{workers}"
    )
    num_gpus = capacity.num_gpus
    if config.model.device != "cuda" or not num_gpus:
        return
    there_are = f": each worker takes a GPU, and there are {num_gpus}"
    if parallel.distributed_executor_backend != "ray":
        _check_workers(parallel, num_gpus, "here", there_are)
        cores = max(1, num_gpus // parallel.world_size)
        _check_at_most("data_parallel_size", _num_cores_here(parallel), cores, "here", there_are)


def check_memory(config: EngineConfig, hf_config: Mapping[str, Any], capacity: Capacity) -> None:
    """Check that this machine's memory has room for processes, weights of all ranks and the least KV cache.

    Only engines that compute on a CPU are checked: nothing is known here about other devices and custom
    executors. The model must be resolved.

    Raises:
        InvalidArgumentError: a count is too large for the memory; the message has the largest that is
            possible.
        EngineStartError: not even one engine core with one worker has room.
    """
    need = _Need.of(config, hf_config)
    if need is None or not _computes_on_cpu(config, capacity):
        return
    free, parallel = capacity.memory, config.parallel
    name = config.model.model
    check_weights_fit(name, need.weights, free, "cpu")
    for_workers = (free - need.weights - need.kv_cache) // TORCH_PROCESS_BYTES
    if config.cache.num_gpu_blocks_override is not None or config.cache.kv_cache_memory_bytes is not None:
        place = "cpu" if parallel.world_size == 1 else f"cpu ({parallel.world_size} workers together)"
        check_kv_cache_fits(need.pages, need.page_bytes, free - need.weights, place)
    if parallel.world_size > 1:
        why = (
            f": each takes at least {size(TORCH_PROCESS_BYTES)} of memory, "
            f"and {size(free)} are free for all and the model"
        )
        _check_workers(parallel, max(1, for_workers), "here", why)
    _check_at_most(
        "data_parallel_size",
        _num_cores_here(parallel),
        max(1, need.max_cores(free, need.shared_weights)),
        "here",
        f": an engine core takes at least {size(need.per_core)} of memory{need.shared}, "
        f"and {size(free)} are free",
    )
    most = free // need.row_bytes
    max_num_seqs = config.scheduler.max_num_seqs
    _check_at_most(
        "max_num_seqs",
        max_num_seqs,
        max(1, most),
        "here",
        f": each takes at least {need.row_bytes} bytes, and {size(free)} are free",
    )


def scaling_refusal(config: EngineConfig, before: int, after: int, capacity: Capacity) -> str | None:
    """Say why an engine of `before` engine cores cannot have `after` here, None if it can."""
    if after <= before:
        return None
    config = replace(config, parallel=replace(config.parallel, data_parallel_size=after))
    try:
        check_counts(config, capacity)
        need = _Need.of(config, load_hf_config(config.model)) if config.model.resolved else None
    except NBEngineError as error:
        return str(error)
    if need is None or not _computes_on_cpu(config, capacity):
        return None
    # The memory of engine cores that run is not free any more. In lock step this includes the weights, which
    # are only divided in another way: a newcomer needs no further copy.
    most = before + need.max_cores(capacity.memory, 0)
    if after <= most:
        return None
    return (
        f"data_parallel_size must be at most {most} here: each further engine core takes at least "
        f"{size(need.per_core)} of memory, and {size(capacity.memory)} are free, got {after}"
    )


@dataclass(frozen=True, slots=True)
class _Need:
    """The least bytes of a CPU's memory that an engine needs."""

    processes: int
    """Bytes of the processes of one engine core, its workers included."""
    weights: int
    """Bytes of one copy of the model."""
    is_shared: bool
    """True if all engine cores share one copy."""
    page_bytes: int
    """Bytes of a KV block of all layers, 0 without a KV cache."""
    pages: int
    """Number of KV blocks of an engine core."""
    row_bytes: int
    """Bytes of one request that runs."""

    @classmethod
    def of(cls, config: EngineConfig, hf_config: Mapping[str, Any]) -> _Need | None:
        """Compute the need of an engine with this configuration; None where nothing is known."""
        parallel = config.parallel
        if parallel.data_parallel_backend == "ray" or parallel.distributed_executor_backend not in (
            None,
            "uni",
            "mp",
        ):
            return None
        page_bytes, max_len, groups = _page_bytes(config, hf_config)
        return cls(
            processes=TORCH_PROCESS_BYTES * parallel.world_size,
            weights=_least_weights_bytes(config),
            is_shared=config.lock_step,
            page_bytes=page_bytes,
            pages=_least_pages(config, page_bytes, max_len, groups) if page_bytes else 0,
            row_bytes=_TOKEN_BYTES * config.cache.block_size,
        )

    @property
    def kv_cache(self) -> int:
        """Return the bytes of one engine core's KV cache."""
        return self.pages * self.page_bytes

    @property
    def shared_weights(self) -> int:
        """Return the bytes of the weights that all engine cores share."""
        return self.weights if self.is_shared else 0

    @property
    def per_core(self) -> int:
        """Return the bytes that each engine core takes in addition to the shared weights."""
        return self.processes + self.kv_cache + (0 if self.is_shared else self.weights)

    @property
    def shared(self) -> str:
        return f", beside the {size(self.weights)} of weights" if self.is_shared else ""

    def max_cores(self, free: int, shared: int) -> int:
        """Return how many engine cores fit in `free` bytes, of which all together take `shared` once."""
        return max(0, free - shared) // self.per_core


def _check_at_most(name: str, value: int, most: int, where: str, why: str) -> None:
    if value > most:
        raise InvalidArgumentError(name, value, f"at most {most} {where}{why}")


def _check_workers(parallel: ParallelConfig, most: int, where: str, why: str) -> None:
    """Check the number of an engine core's workers; the error names the larger of the sizes that make it."""
    if parallel.world_size <= most:
        return
    sizes = {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
    }
    name = max(sizes, key=lambda each: sizes[each])
    other = parallel.world_size // sizes[name]
    raise InvalidArgumentError(name, sizes[name], f"at most {max(1, most // other)} {where}{why}")


def _num_cores_here(parallel: ParallelConfig) -> int:
    return 1 if parallel.data_parallel_backend == "ray" else parallel.data_parallel_size


def _processes_of_core(parallel: ParallelConfig) -> int:
    """Return the number of processes that one engine core has on its machine."""
    backend = parallel.distributed_executor_backend
    if backend == "ray" or (parallel.world_size == 1 and backend != "mp"):
        return 1
    return 1 + parallel.world_size


def _computes_on_cpu(config: EngineConfig, capacity: Capacity) -> bool:
    return config.model.device == "cpu" or (config.model.device == "auto" and capacity.num_gpus == 0)


def _least_weights_bytes(config: EngineConfig) -> int:
    """Return the least bytes of the model in memory: of rounded weights those of files in 32 bits."""
    model = config.model
    try:
        file_bytes = sum(Path(path).stat().st_size for path in model.weights)
    except OSError as error:
        raise ModelLoadError(f"cannot read the weights of {model.model!r}: {error}") from error
    is_unpacked = any(path.lower().endswith(".gguf") for path in model.weights)
    halves = _DTYPE_BYTES[model.dtype] == 2 and model.dtype != "auto" and not is_unpacked
    share = 1 / 2 if halves else 1.0
    if model.quantization is not None:
        share = ROUNDINGS[model.quantization] / 32
    return int(file_bytes * _CERTAIN_SHARE * share)


def _page_bytes(config: EngineConfig, hf_config: Mapping[str, Any]) -> tuple[int, int, CacheGroups]:
    """Return the bytes of a KV block in all workers of an engine core, the model's longest context, and the groups
    of its layers.

    The numbers are 0 if the model has no KV cache, or cannot be loaded.
    """
    # What somebody has registered is imported where the model runs.
    if is_encoder(hf_config) or is_registered(hf_config):
        return 0, 0, ONE_GROUP
    try:
        model = decoder_config(hf_config)
    except ModelLoadError:
        return 0, 0, ONE_GROUP  # the engine core says what is wrong with the model
    groups = make_groups(model.cache_rules())
    layers = map(model.of_layer, range(model.num_layers))
    row = model.cache_parts * max(layer.num_kv_heads * layer.head_dim for layer in layers)
    per_token = row * groups.num_tensors(range(model.num_layers))
    page_bytes = per_token * _DTYPE_BYTES[config.model.dtype] * config.cache.block_size
    return page_bytes, model.max_position_embeddings, groups


def _least_pages(config: EngineConfig, page_bytes: int, max_len: int, groups: CacheGroups) -> int:
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // page_bytes
    return groups.most_blocks(min(config.model.max_model_len or 1, max_len), cache.block_size, 1)
