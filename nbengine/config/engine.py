"""Engine arguments as people give them, and the configuration they make."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import Any

from nbengine.checks import one_of, require, require_number
from nbengine.config.cache import CacheConfig
from nbengine.config.model import ModelConfig
from nbengine.config.parallel import ParallelConfig
from nbengine.config.scheduler import DEFAULT_MAX_NUM_BATCHED_TOKENS, SchedulerConfig
from nbengine.errors import InvalidArgumentError, InvalidTypeError, NotSupportedError

DEFAULT_KEEP_ALIVE_SECONDS = 600.0
DEFAULT_LEASE_SECONDS = 30.0
DEFAULT_CLIENT_BACKLOG_BYTES = 64 << 20
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "runner": ("auto", "generate", "pooling"),
    "enable_prompt_embeds": (True, False),
    "enable_sleep_mode": (True, False),
    "disable_log_stats": (True, False),
    "tokenizer_mode": ("auto",),
    "kv_cache_dtype": ("auto",),
}
"""Arguments that existing scripts pass and that leave nothing to choose here, with the values that are true of it."""
NOT_OFFERED = frozenset(
    (
        "compilation_config",
        "cpu_offload_gb",
        "enable_lora",
        "kv_transfer_config",
        "limit_mm_per_prompt",
        "max_lora_rank",
        "max_loras",
        "skip_tokenizer_init",
        "speculative_config",
        "swap_space",
    )
)
"""Arguments that scripts for other engines pass, and that mean something which there is not here."""
_DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class EngineConfig:
    """Everything that the processes of one engine need to know.

    `keep_alive` is how many seconds an engine outlives its last client; `lease` how long a client that
    sends no heartbeat keeps its requests. A `bound` engine ends with the process that started it.
    `client_backlog_bytes` is how much output the engine holds for a client that does not read, before the requests
    of that client are given up; `profile_dir` where profiles are written unless a caller says otherwise.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    keep_alive: float = DEFAULT_KEEP_ALIVE_SECONDS
    lease: float = DEFAULT_LEASE_SECONDS
    bound: bool = True
    client_backlog_bytes: int = DEFAULT_CLIENT_BACKLOG_BYTES
    profile_dir: str | None = None

    def __post_init__(self) -> None:
        require("keep_alive", self.keep_alive, self.keep_alive >= 0, "0 or more seconds")
        require("lease", self.lease, self.lease > 0, "more than 0 seconds")
        backlog = self.client_backlog_bytes
        require("client_backlog_bytes", backlog, 1 <= backlog < 2**63, "at least 1, below 2**63")
        stages, ahead = self.parallel.pipeline_parallel_size, self.scheduler.async_scheduling
        require(
            "async_scheduling",
            ahead,
            not (ahead and stages > 1),
            f"None or False with {stages} pipeline stages",
        )

        backend = self.parallel.distributed_executor_backend
        require(
            "distributed_executor_backend",
            backend,
            not (backend == "ray" and self.lock_step and self.parallel.data_parallel_size > 1),
            "None or 'mp' for a mixture of experts in several engine cores",
        )

    @property
    def lock_step(self) -> bool:
        """Whether the engine cores step together, in waves: their workers compute the experts for each other."""
        return self.model.is_moe


@dataclass(frozen=True)
class EngineArgs:
    """The arguments of `LLM`, `AsyncLLM` and `%engine start`, flat, with their defaults.

    The last ones are taken because existing scripts pass them, and are not kept: an engine offers whatever its model
    supports (`runner`), takes embeddings as prompts (`enable_prompt_embeds`), can always sleep (`enable_sleep_mode`)
    and never logs statistics (`disable_log_stats`).

    Raises:
        InvalidTypeError: an argument has the wrong type.
        InvalidArgumentError: `create_engine_config` met a value out of range; the message names it.
        NotSupportedError: `create_engine_config` met an option that this version does not offer yet.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    hf_overrides: dict[str, Any] | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    stream_interval: int = 1
    logits_processors: list[str] | tuple[str, ...] | None = None
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | None = None
    data_parallel_backend: str = "mp"
    distributed_init_method: str | None = None
    data_parallel_address: str | None = None
    data_parallel_prefix_affinity: bool = False
    ray_address: str | None = None
    ray_timeout: float = 60.0
    ray_cpus_per_worker: int = 1
    keep_alive: float = DEFAULT_KEEP_ALIVE_SECONDS
    lease: float = DEFAULT_LEASE_SECONDS
    client_backlog_bytes: int = DEFAULT_CLIENT_BACKLOG_BYTES
    profile_dir: str | None = None
    runner: InitVar[str] = "auto"
    enable_prompt_embeds: InitVar[bool] = False
    enable_sleep_mode: InitVar[bool] = False
    disable_log_stats: InitVar[bool] = False
    tokenizer_mode: InitVar[str] = "auto"
    kv_cache_dtype: InitVar[str] = "auto"

    def __post_init__(self, *without_effect: object) -> None:
        for (name, allowed), value in zip(WITHOUT_EFFECT.items(), without_effect, strict=True):
            one_of(name, value, allowed)
        hints = typing.get_type_hints(type(self))
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name), hints[f.name])

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> EngineArgs:
        """Build from keyword arguments.

        Raises:
            InvalidArgumentError: a name is not known; the message has the one that was meant, or all there are.
            NotSupportedError: it is one of `NOT_OFFERED`.
        """
        known = sorted(f.name for f in fields(cls))
        for name in kwargs:
            if name in NOT_OFFERED:
                raise NotSupportedError(f"{name} is not offered; leave it out")
            if name not in known and name not in WITHOUT_EFFECT:
                near = difflib.get_close_matches(name, known, n=1)
                allowed = f"a known name such as {near[0]}" if near else "one of " + ", ".join(known)
                raise InvalidArgumentError("engine argument", name, allowed)
        return cls(**kwargs)

    def create_engine_config(self, *, bound: bool) -> EngineConfig:
        """Check every value and sort the arguments into their configuration classes."""
        _refuse_unsupported(self)
        return EngineConfig(
            model=ModelConfig(
                model=self.model,
                tokenizer=self.tokenizer,
                dtype=_DTYPE_SYNONYMS.get(self.dtype, self.dtype),
                quantization=self.quantization,
                load_format=self.load_format,
                device=self.device,
                max_model_len=self.max_model_len,
                seed=self.seed,
                hf_overrides=dict(self.hf_overrides or {}),
                trust_remote_code=self.trust_remote_code,
                revision=self.revision,
                enforce_eager=self.enforce_eager,
                logits_processors=tuple(self.logits_processors or ()),
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                num_gpu_blocks_override=self.num_gpu_blocks_override,
                enable_prefix_caching=self.enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=(
                    DEFAULT_MAX_NUM_BATCHED_TOKENS
                    if self.max_num_batched_tokens is None
                    else self.max_num_batched_tokens
                ),
                enable_chunked_prefill=self.enable_chunked_prefill,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                policy=self.scheduling_policy,
                async_scheduling=self.async_scheduling,
                stream_interval=self.stream_interval,
            ),
            parallel=ParallelConfig(
                tensor_parallel_size=self.tensor_parallel_size,
                pipeline_parallel_size=self.pipeline_parallel_size,
                data_parallel_size=self.data_parallel_size,
                enable_expert_parallel=self.enable_expert_parallel,
                distributed_executor_backend=self.distributed_executor_backend,
                data_parallel_backend=self.data_parallel_backend,
                distributed_init_method=self.distributed_init_method,
                data_parallel_address=self.data_parallel_address,
                data_parallel_prefix_affinity=self.data_parallel_prefix_affinity,
                ray_address=self.ray_address,
                ray_timeout=float(self.ray_timeout),
                ray_cpus_per_worker=self.ray_cpus_per_worker,
            ),
            keep_alive=float(self.keep_alive),
            lease=float(self.lease),
            bound=bound,
            client_backlog_bytes=self.client_backlog_bytes,
            profile_dir=self.profile_dir,
        )


AsyncEngineArgs = EngineArgs
"""The name that scripts for `AsyncLLM` import."""


def _refuse_unsupported(args: EngineArgs) -> None:
    if args.quantization is not None:
        raise NotSupportedError(
            f"quantization={args.quantization!r} is not available yet; GGUF files load as they are"
        )


def _check_type(name: str, value: object, hint: Any) -> None:
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        require_number(name, value)
        return
    is_stray_bool = isinstance(value, bool) and bool not in kinds
    if is_stray_bool or not isinstance(value, kinds):
        names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise InvalidTypeError(name, value, names)
