"""Command lines of `%engine`: every engine argument is a flag of `%engine start`."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from IPython.core.error import UsageError

from nbengine.client.connection import newest
from nbengine.config import EngineArgs, EngineConfig
from nbengine.magics.arguments import (
    MagicParser,
    did_you_mean,
    json_object,
    key_value,
    memory_size,
    variable_name,
)
from nbengine.magics.session import AttachedEngine

_SHORT = {
    "tensor_parallel_size": ("--tp",),
    "pipeline_parallel_size": ("--pp",),
    "data_parallel_size": ("--dp",),
    "data_parallel_backend": ("--dp-backend",),
    "data_parallel_prefix_affinity": ("--prefix-affinity",),
    "data_parallel_address": ("--dp-address",),
    "num_gpu_blocks_override": ("--num-blocks",),
}
_READERS: dict[str, Callable[[str], Any]] = {
    "hf_overrides": json_object,
    "logits_processors": lambda text: text.split(","),
    "kv_cache_memory_bytes": memory_size,
    "client_backlog_bytes": memory_size,
}
_HELP = {
    "tokenizer": "directory or hub id of the tokenizer (default: the model's)",
    "dtype": "auto, float32, bfloat16 or float16",
    "quantization": "not available yet: GGUF files load as they are",
    "load_format": "auto, safetensors or gguf",
    "device": "auto, cpu or cuda",
    "max_model_len": "longest prompt plus answer, in tokens (default: the model's own limit)",
    "seed": "seed of the sampler",
    "hf_overrides": "JSON object that replaces values of the model's config.json",
    "trust_remote_code": "run Python code that comes with the model",
    "revision": "branch, tag or commit on the hub",
    "block_size": "tokens a KV cache block holds, a power of two",
    "gpu_memory_utilization": "share of the GPU's memory that the engine may use",
    "kv_cache_memory_bytes": "size of the KV cache: 512MiB, 2GiB, or bytes",
    "num_gpu_blocks_override": "size of the KV cache in blocks",
    "enable_prefix_caching": "reuse the KV cache of prompts that begin alike",
    "max_num_seqs": "most requests in one step",
    "max_num_batched_tokens": "most tokens in one step",
    "enable_chunked_prefill": "let a long prompt take several steps",
    "long_prefill_token_threshold": "most tokens of one prompt in a step; 0: no limit (default)",
    "scheduling_policy": "fcfs or priority",
    "async_scheduling": "plan a step while the one before runs: on for GPUs (default), or always, or never",
    "stream_interval": "tokens between two updates of a stream",
    "logits_processors": "classes that change the logits, as module:Class,module:Class",
    "enforce_eager": "no compilation, no CUDA graphs",
    "tensor_parallel_size": "processes that share every layer, by its heads and columns (on GPUs, one each)",
    "pipeline_parallel_size": "stages of so many processes that have some of the layers each",
    "data_parallel_size": "engine cores that share the requests; those of a model with experts step together",
    "enable_expert_parallel": "whole experts for each worker, instead of a part of every expert",
    "distributed_executor_backend": "uni (the model in the engine core), mp (a process for each worker, the default "
    "for several), ray or module:Class",
    "distributed_init_method": "where workers find each other, tcp://127.0.0.1:29500 for instance (default: a file "
    "in the engine's own directory)",
    "data_parallel_backend": "mp (the engine cores are processes here) or ray (on the machines of a Ray cluster)",
    "data_parallel_address": "address of this machine for engine cores on others (default: found out)",
    "data_parallel_prefix_affinity": "send a prompt where its first blocks are likely to be cached",
    "ray_address": "address of the Ray cluster (default: RAY_ADDRESS, or the one that runs here)",
    "ray_timeout": "seconds that the Ray cluster may take to make room",
    "ray_cpus_per_worker": "CPUs of its node that a worker takes there, and its threads",
    "keep_alive": "seconds that the engine outlives its last notebook",
    "lease": "seconds without a heartbeat after which a notebook's requests are dropped",
    "client_backlog_bytes": "output that is held for a notebook that does not read, before its requests end",
    "profile_dir": "where %%engine profile writes (default: nbengine-profiles in the working directory)",
}
_DESCRIPTIONS = {
    "start": "Start an engine in a process of its own. It keeps running while cells come and go.",
    "restart": "Stop the engine and start it again, with the same arguments except for those given here.",
    "load": "Put another model in an engine's place, under its name and with its other arguments. The model's files are "
    "found first; if it does not start, the one before is started again.",
    "fit": "Work out whether a model fits on this machine, and how: nothing is loaded, and no weights are downloaded "
    "from the hub. The flags are those of a start.",
}
_NAME_HELP = {"start": "name of the engine (default: made from the model's)"}
START_EXAMPLES = """\
examples:
  %engine start                                   the small default model, on what this machine has
  %engine start random-tiny --num-blocks 64       a toy model and a tight KV cache, to watch preemption
  %engine start ./model.gguf --max-model-len 4096
  %engine start smollm2-135m --name second        beside an engine that runs already
  %engine start random-tiny --tp 2 --pp 2         the model divided among four processes
  %engine start random-tiny --dp 2                two engine cores that share the requests
"""


@dataclass(frozen=True)
class StartOptions:
    """What a line of `%engine start` and its like asks for; `arguments` are those that were given."""

    name: str | None = None
    out: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def start_parser(command: str = "start", prog: str = "") -> MagicParser:
    """Parser of `%engine start`, `restart`, `load` and `fit`, made from the fields of `EngineArgs`."""
    prog = prog or f"%engine {command}"
    parser = MagicParser(
        prog,
        _DESCRIPTIONS[command],
        START_EXAMPLES if command == "start" else "",
        usage=f"{prog.replace('%', '%%')} [MODEL] [flags]",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="an alias, a directory, a .gguf file or a hub id"
    )
    if command != "fit":
        parser.add_argument("--name", help=_NAME_HELP.get(command, "engine (default: the last one)"))
    bound = "report" if command == "fit" else "engine's AsyncLLM"
    parser.add_argument(
        "-o", "--out", metavar="NAME", type=variable_name, help=f"bind the {bound} to a variable"
    )
    hints = typing.get_type_hints(EngineArgs)
    for argument in fields(EngineArgs):
        if argument.name != "model":
            _add_engine_argument(parser, argument, hints[argument.name])
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        type=key_value,
        action="append",
        default=[],
        help="any engine argument by its Python name, the value as JSON",
    )
    return parser


def parse_start(words: Sequence[str], command: str = "start", prog: str = "") -> StartOptions:
    """Read a line of `%engine start`, `restart`, `load` or `fit`."""
    parsed = vars(start_parser(command, prog).parse_words(words))
    known = {argument.name for argument in fields(EngineArgs)}
    arguments = {name: value for name, value in parsed.items() if name in known and value is not None}
    for name, value in parsed["set"]:
        if name not in known:
            raise UsageError(
                f"{prog or f'%engine {command}'}: --set: no engine argument {name!r}{did_you_mean(name, known)}"
            )
        arguments[name] = value
    return StartOptions(parsed.get("name"), parsed["out"], arguments)


def values_of(config: EngineConfig) -> dict[str, Any]:
    """The engine arguments that make `config`."""
    parts: tuple[object, ...] = (config.model, config.cache, config.scheduler, config.parallel, config)
    found: dict[str, Any] = {"scheduling_policy": config.scheduler.policy}
    for argument in fields(EngineArgs):
        for part in parts:
            if hasattr(part, argument.name):
                found[argument.name] = getattr(part, argument.name)
                break
    found["model"] = config.model.model
    return found


def arguments_of(config: EngineConfig) -> dict[str, Any]:
    """The engine arguments that make `config`, without those that have their default value."""
    defaults = {f.name: f.default for f in fields(EngineArgs)} | {"hf_overrides": {}, "logits_processors": ()}
    return {name: value for name, value in values_of(config).items() if value != defaults[name]}


def present_arguments(engine: AttachedEngine) -> dict[str, Any]:
    """The arguments that make an engine as it is now: somebody else may have changed the number of its engine cores."""
    info = engine.client.connection
    found = newest(info)
    if found is info:
        # It has ended, and its last known number is the one that was set here.
        return dict(engine.arguments)
    size = found.config.parallel.data_parallel_size
    known = engine.arguments.get("data_parallel_size", EngineArgs.data_parallel_size)
    return engine.arguments | ({} if size == known else {"data_parallel_size": size})


def _add_engine_argument(parser: MagicParser, argument: Field[Any], hint: Any) -> None:
    flags = (*_SHORT.get(argument.name, ()), "--" + argument.name.replace("_", "-"))
    kinds = set(typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)) - {types.NoneType}
    help_text = _HELP.get(argument.name, "")
    if argument.default not in (None, "auto") and "default" not in help_text:
        help_text += f" (default: {_shown(argument.default)})"
    if kinds == {bool}:
        parser.add_argument(
            *flags, dest=argument.name, action=argparse.BooleanOptionalAction, default=None, help=help_text
        )
        return
    reader = _READERS.get(argument.name) or (float if float in kinds else int if int in kinds else str)
    metavar = "N" if reader is int else "S" if argument.name in ("keep_alive", "lease") else "X"
    parser.add_argument(*flags, dest=argument.name, type=reader, metavar=metavar, help=help_text)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)
