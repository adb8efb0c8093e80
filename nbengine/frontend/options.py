"""The engine arguments as keyword arguments of `LLM` and `AsyncLLM`: for type checkers, and for `help()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypedDict, TypeVar

from nbengine.config import EngineArgs

F = TypeVar("F", bound=Callable[..., Any])


class EngineOptions(TypedDict, total=False):
    """Everything that `EngineArgs` takes but the model; the defaults are there."""

    tokenizer: str | None
    dtype: str
    quantization: str | None
    load_format: str
    device: str
    max_model_len: int | None
    seed: int
    hf_overrides: dict[str, Any] | None
    trust_remote_code: bool
    revision: str | None
    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduling_policy: str
    async_scheduling: bool | None
    stream_interval: int
    logits_processors: list[str] | tuple[str, ...] | None
    enforce_eager: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    distributed_executor_backend: str | None
    distributed_init_method: str | None
    data_parallel_address: str | None
    data_parallel_prefix_affinity: bool
    ray_address: str | None
    ray_timeout: float
    ray_cpus_per_worker: int
    data_parallel_backend: str
    keep_alive: float
    lease: float
    client_backlog_bytes: int
    profile_dir: str | None
    runner: str
    enable_prompt_embeds: bool
    enable_sleep_mode: bool
    disable_log_stats: bool
    tokenizer_mode: str
    kv_cache_dtype: str


def with_engine_options(function: F) -> F:
    """Let `help()`, completion and `inspect` show the engine arguments in place of `**options`."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(EngineArgs)
        if f.name != "model"
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function
