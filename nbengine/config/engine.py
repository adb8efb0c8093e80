"""Engine arguments as people give them, and the configuration they make."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, NamedTuple, Self, TypeVar

from nbengine.checks import (
    checked_json_object,
    one_of,
    require,
    require_bool,
    require_line,
    require_number,
)
from nbengine.config.argument import argument
from nbengine.config.cache import CacheConfig
from nbengine.config.chat_template import template_text
from nbengine.config.model import ModelConfig
from nbengine.config.parallel import ParallelConfig
from nbengine.config.progress import DEFAULT_STEP_TIMEOUT_SECONDS, ProgressDeadlines
from nbengine.config.scheduler import DEFAULT_MAX_NUM_BATCHED_TOKENS, SchedulerConfig
from nbengine.errors import InvalidTypeError, NotSupportedError, UnknownArgumentError
from nbengine.plain import plain, plain_name

DEFAULT_KEEP_ALIVE_SECONDS = 600.0
DEFAULT_LEASE_SECONDS = 30.0
DEFAULT_CLIENT_BACKLOG_BYTES = 64 << 20


C = TypeVar("C", ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig)


class Idle(NamedTuple):
    """An argument that is accepted and changes nothing."""

    allowed: tuple[object, ...]
    """The values that are accepted: they say what holds for every engine, or ask for what it does anyway."""
    why: str


WITHOUT_EFFECT: dict[str, Idle] = {
    "runner": Idle(
        ("auto", "generate", "pooling"), "an engine offers whatever its model supports: text, vectors, scores"
    ),
    "enable_prompt_embeds": Idle((True, False), "an engine always takes embeddings as prompts"),
    "enable_sleep_mode": Idle((True, False), "an engine can always sleep"),
    "disable_log_stats": Idle(
        (True, False), "an engine never logs statistics; `stats()` and `%dashboard` show them"
    ),
    "trust_remote_code": Idle((True, False), "Python code that comes with a model is never run"),
}
"""Arguments that existing scripts pass and that leave nothing to choose; docs/arguments.md has them, too."""
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
"""Arguments that scripts for other engines pass, for features that this engine does not have."""
_DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}
_DTYPE_SYNONYMS |= {f"torch.{name}": name for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class EngineConfig:
    """Everything that the processes of one engine need to know.

    `keep_alive` is the number of seconds that an engine outlives its last client. `lease` is the number of
    seconds for which a client keeps its requests while its process is stopped or, on another machine, sends
    no heartbeat. A `bound` engine ends with the process that started it. `client_backlog_bytes` is the most
    output that the engine holds for a client that does not read; beyond it the requests of that client are
    given up. `profile_dir` is where profiles are written unless a caller says otherwise. `step_timeout` is
    the number of seconds that an engine core may stand in a step (`ProgressDeadlines`). At `metrics_port` the
    host answers Prometheus.
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
    step_timeout: float = DEFAULT_STEP_TIMEOUT_SECONDS
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        require(
            "step_timeout",
            self.step_timeout,
            0 <= self.step_timeout < math.inf,
            "0 (no limit) or more seconds",
        )
        require("keep_alive", self.keep_alive, self.keep_alive >= 0, "0 or more seconds")
        require("lease", self.lease, self.lease > 0, "more than 0 seconds")
        port = self.metrics_port
        require(
            "metrics_port", port, port is None or 0 <= port < 65536, "None, or from 0 (any free one) to 65535"
        )
        backlog = self.client_backlog_bytes
        require("client_backlog_bytes", backlog, 1 <= backlog < 2**63, "at least 1, below 2**63")
        cached = self.cache.kv_cache_dtype
        require(
            "kv_cache_dtype",
            cached,
            cached == "auto" or self.model.device != "cuda",
            "'auto' with device='cuda' (only the CPU has kernels for an int8 KV cache)",
        )
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
    def progress_deadlines(self) -> ProgressDeadlines:
        """Return the deadlines of an engine core that makes no progress."""
        return ProgressDeadlines.of_step_timeout(self.step_timeout)

    @property
    def lock_step(self) -> bool:
        """Tell whether the engine cores step in waves, because their workers need each other's experts."""
        return self.model.is_moe


@dataclass(frozen=True)
class EngineArgs:
    """The arguments of `LLM`, `AsyncLLM` and `%engine start`, flat, with their defaults.

    The last ones have no effect and are not kept; they are accepted because existing scripts pass them, and
    `WITHOUT_EFFECT` says why they change nothing. A number may be one of NumPy or torch, a name a path, `dtype`
    torch's own.

    Raises:
        InvalidTypeError: an argument has the wrong type.
        UnknownArgumentError: a keyword is not an argument; the message has the one that was probably meant,
            or all.
        NotSupportedError: a keyword is one of `NOT_OFFERED`.
        InvalidArgumentError: `create_engine_config` met a value out of range; the message names it.
    """

    model: str = argument("smollm2-135m", "an alias, a directory, a .gguf file or a hub id")
    tokenizer: str | None = argument(None, "directory or hub id of the tokenizer (default: the model's)")
    tokenizer_mode: str = argument(
        "auto",
        "auto (tokenizer.json, made of another vocabulary where it is missing), fast (tokenizer.json alone) or "
        "slow (made of the other vocabulary, whatever tokenizer.json says)",
    )
    chat_template: str | None = argument(
        None, "file or text of a Jinja template for chats (default: the model's)", metavar="FILE"
    )
    generation_config: str = argument(
        "auto", "auto (sampling defaults from the model's generation_config.json) or none (neutral ones)"
    )
    dtype: str = argument("auto", "auto, float32, bfloat16 or float16")
    quantization: str | None = argument(
        None, "int8 or int4: round the weights of safetensors files when they are loaded (on a CPU)"
    )
    activation_dtype: str = argument(
        "auto",
        "what is multiplied with quantised weights is rounded to 8 bits, before the output projection to 16 (auto), or "
        "always to 16 (int16: nearly exact, slower prompts)",
    )
    load_format: str = argument("auto", "auto, safetensors or gguf")
    model_impl: str = argument(
        "auto",
        "nbengine (the engine's own layers), transformers (those of its class there), or auto: the first "
        "that there is",
    )
    device: str = argument("auto", "auto, cpu or cuda")
    max_model_len: int | None = argument(
        None, "longest prompt plus answer, in tokens (default: the model's own limit)"
    )
    seed: int | None = argument(0, "seed of the sampler; None is 0")
    enforce_eager: bool = argument(
        False, "on a GPU, start each operation of a step by itself instead of decode steps as CUDA graphs"
    )
    hf_overrides: dict[str, Any] | None = argument(
        None, "JSON object that replaces values of the model's config.json", reads="json"
    )
    revision: str | None = argument(None, "branch, tag or commit on the hub")
    block_size: int = argument(16, "tokens that a KV cache block holds, a power of two")
    gpu_memory_utilization: float = argument(0.9, "share of the GPU's memory that the engine may use")
    kv_cache_memory_bytes: int | None = argument(
        None, "size of the KV cache: 512MiB, 2GiB, or bytes", reads="bytes"
    )
    num_gpu_blocks_override: int | None = argument(
        None, "size of the KV cache in blocks", flags=("--num-blocks",)
    )
    kv_cache_dtype: str = argument(
        "auto", "auto (the type in which the model computes) or int8: about half the memory (on a CPU)"
    )
    enable_prefix_caching: bool = argument(True, "reuse the KV cache of prompts that begin alike")
    max_num_seqs: int = argument(256, "most requests in one step")
    max_num_batched_tokens: int | None = argument(
        None, f"most tokens in one step (default: {DEFAULT_MAX_NUM_BATCHED_TOKENS})"
    )
    enable_chunked_prefill: bool = argument(True, "let a long prompt take several steps")
    long_prefill_token_threshold: int = argument(
        0, "most tokens of one prompt in a step; 0: no limit (default)"
    )
    scheduling_policy: str = argument("fcfs", "fcfs or priority")
    async_scheduling: bool | None = argument(
        None, "plan a step while the step before it runs (default: on GPUs only)"
    )
    stream_interval: int = argument(1, "tokens between two updates of a stream")
    logits_processors: list[str] | tuple[str, ...] | None = argument(
        None, "classes that change the logits, as module:Class,module:Class", reads="names"
    )
    tensor_parallel_size: int = argument(
        1, "processes that share every layer, by its heads and columns (on GPUs, one each)", flags=("--tp",)
    )
    pipeline_parallel_size: int = argument(
        1,
        "stages that have some of the layers each; tensor_parallel_size processes for every stage",
        flags=("--pp",),
    )
    data_parallel_size: int = argument(
        1,
        "engine cores that share the requests; with a mixture of experts they step together",
        flags=("--dp",),
    )
    enable_expert_parallel: bool = argument(
        False, "give each worker whole experts, instead of a part of every expert"
    )
    distributed_executor_backend: str | None = argument(
        None,
        "uni (the model in the engine core), mp (a process for each worker, the default for several), "
        "ray or module:Class",
    )
    data_parallel_backend: str = argument(
        "mp",
        "mp (the engine cores are processes here) or ray (on the machines of a Ray cluster)",
        flags=("--dp-backend",),
    )
    distributed_init_method: str | None = argument(
        None,
        "where workers find each other, tcp://127.0.0.1:29500 for instance "
        "(default: a file in the engine's own directory)",
    )
    data_parallel_address: str | None = argument(
        None,
        "address of this machine for engine cores on other machines (default: found automatically)",
        flags=("--dp-address",),
    )
    data_parallel_prefix_affinity: bool = argument(
        False, "send a prompt where its first blocks are likely to be cached", flags=("--prefix-affinity",)
    )
    ray_address: str | None = argument(
        None, "address of the Ray cluster (default: RAY_ADDRESS, or the one that runs here)"
    )
    ray_timeout: float = argument(60.0, "seconds that the Ray cluster may take to make room")
    ray_cpus_per_worker: int = argument(
        1, "CPUs of its node that a worker takes in the Ray cluster, and threads that it has"
    )
    keep_alive: float = argument(
        DEFAULT_KEEP_ALIVE_SECONDS, "seconds that the engine outlives its last notebook", metavar="S"
    )
    lease: float = argument(
        DEFAULT_LEASE_SECONDS,
        "seconds after which a notebook that is stopped, or silent on another machine, loses its requests",
        metavar="S",
    )
    client_backlog_bytes: int = argument(
        DEFAULT_CLIENT_BACKLOG_BYTES,
        "most output that is held for a notebook that does not read; beyond it, its requests end",
        reads="bytes",
    )
    profile_dir: str | None = argument(
        None, "where %engine profile writes (default: nbengine-profiles in the working directory)"
    )
    step_timeout: float = argument(
        DEFAULT_STEP_TIMEOUT_SECONDS,
        "seconds that an engine core may stand in a step before it is ended; 0: no limit",
        metavar="S",
    )
    metrics_port: int | None = argument(
        None, "port of this machine's loopback where Prometheus finds /metrics; 0: any free one"
    )
    runner: InitVar[str] = "auto"
    enable_prompt_embeds: InitVar[bool] = False
    enable_sleep_mode: InitVar[bool] = False
    disable_log_stats: InitVar[bool] = False
    trust_remote_code: InitVar[bool] = False

    def __new__(cls, *_: Any, **arguments: Any) -> Self:
        _check_names(arguments, "EngineArgs")
        return super().__new__(cls)

    def __post_init__(self, *without_effect: object) -> None:
        for (name, idle), value in zip(WITHOUT_EFFECT.items(), without_effect, strict=True):
            one_of(name, value, idle.allowed)
        hints = argument_types(type(self))
        for f in fields(self):
            value = getattr(self, f.name)
            checked = _checked_type(f.name, value, hints[f.name])
            if checked is not value:
                object.__setattr__(self, f.name, checked)

    @classmethod
    def from_kwargs(
        cls, kwargs: Mapping[str, Any], function: str = "EngineArgs", own: Collection[str] = ()
    ) -> EngineArgs:
        """Build from keyword arguments of `function`, which has `own` ones, too; raise as the class does."""
        _check_names(kwargs, function, own)
        return cls(**kwargs)

    def create_engine_config(self, *, bound: bool) -> EngineConfig:
        """Check every value and sort the arguments into their configuration classes."""
        values = self._values()
        return EngineConfig(
            model=_part(ModelConfig, values),
            cache=_part(CacheConfig, values),
            scheduler=_part(SchedulerConfig, values),
            parallel=_part(ParallelConfig, values),
            bound=require_bool("bound", bound),
            **{
                f.name: values[f.name] for f in fields(EngineConfig) if f.name in values and f.name != "model"
            },
        )

    def _values(self) -> dict[str, Any]:
        """Return the arguments as the configuration classes hold them."""
        hints = argument_types(type(self))
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: float(value) for name, value in values.items() if hints[name] is float}
        values["chat_template"] = template_text(self.chat_template)
        values["seed"] = self.seed or 0
        values["dtype"] = _DTYPE_SYNONYMS.get(self.dtype, self.dtype)
        values["hf_overrides"] = dict(self.hf_overrides or {})
        values["logits_processors"] = tuple(self.logits_processors or ())
        if self.max_num_batched_tokens is None:
            values["max_num_batched_tokens"] = DEFAULT_MAX_NUM_BATCHED_TOKENS
        return values


AsyncEngineArgs = EngineArgs
"""The name that scripts for `AsyncLLM` import."""


def argument_types(arguments: type[EngineArgs] = EngineArgs) -> Mapping[str, Any]:
    """Return the type of each engine argument by its name.

    Args:
        arguments: the class; one that is derived from `EngineArgs` may have more.
    """
    # mypy takes the hash of a class's objects for that of the class.
    return _types_of(arguments)  # type: ignore[arg-type]


@functools.cache
def _types_of(arguments: type[EngineArgs]) -> Mapping[str, Any]:
    # To read the annotations takes milliseconds each time.
    return types.MappingProxyType(typing.get_type_hints(arguments))


def argument_names() -> list[str]:
    """Return the names of all engine arguments in their order; those without an effect come last."""
    return [*(f.name for f in fields(EngineArgs)), *WITHOUT_EFFECT]


def _part(kind: type[C], values: Mapping[str, Any]) -> C:
    return kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values})


def _check_names(names: Iterable[str], function: str, own: Collection[str] = ()) -> None:
    known = {*argument_names(), *own}
    for name in names:
        if name in NOT_OFFERED:
            raise NotSupportedError(f"{name} is not offered; leave it out")
        if name not in known:
            raise UnknownArgumentError.among(function, name, known)


def _checked_type(name: str, value: object, hint: Any) -> object:
    """Return the argument as a value of the type that `hint` names: NumPy's numbers, paths and torch's names
    of types are taken for what they stand for."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    found = plain_name(value) if str in kinds else plain(value)
    if float in kinds and isinstance(found, (int, float)) and not isinstance(found, bool):
        return require_number(name, found)
    is_stray_bool = isinstance(found, bool) and bool not in kinds
    if is_stray_bool or not isinstance(found, kinds):
        names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise InvalidTypeError(name, value, names)
    if isinstance(found, str):
        require_line(name, found)
    elif isinstance(found, dict):
        return checked_json_object(name, found)
    return found
