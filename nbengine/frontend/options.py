"""The engine arguments as keyword arguments of `LLM` and `AsyncLLM`: for type checkers, and for `help()`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, Protocol, TypedDict, TypeVar

from nbengine.config import EngineArgs

F = TypeVar("F", bound=Callable[..., Any])
PathName = str | os.PathLike[str]
"""A name that may be a path."""


class DType(Protocol):
    """A type of numbers, as torch and NumPy have it; neither is loaded to name it."""

    @property
    def itemsize(self) -> int: ...


class EngineOptions(TypedDict, total=False):
    """The arguments that `EngineArgs` takes, but for the model; it has their defaults.

    Type checkers and editors read names and types of a `TypedDict` where they are written, and derive none: so they stand
    here once more, with what may stand for a string. `tests/unit/parameters/test_every_parameter_is_read.py` compares both.
    """

    tokenizer: PathName | None
    tokenizer_mode: str
    chat_template: PathName | None
    generation_config: str
    dtype: str | DType
    quantization: str | None
    activation_dtype: str
    load_format: str
    model_impl: str
    device: str
    max_model_len: int | None
    seed: int | None
    hf_overrides: dict[str, Any] | None
    revision: str | None
    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    kv_cache_dtype: str
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduling_policy: str
    async_scheduling: bool | None
    stream_interval: int
    logits_processors: list[str] | tuple[str, ...] | None
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
    step_timeout: float
    metrics_port: int | None
    lease: float
    client_backlog_bytes: int
    profile_dir: PathName | None
    runner: str
    enable_prompt_embeds: bool
    enable_sleep_mode: bool
    disable_log_stats: bool
    enforce_eager: bool
    trust_remote_code: bool


def with_engine_options(function: F) -> F:
    """Let `help()`, completion and `inspect` show the engine arguments in place of `**options`."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(EngineArgs.__init__).parameters.items()
        if name not in ("self", "model")
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function
