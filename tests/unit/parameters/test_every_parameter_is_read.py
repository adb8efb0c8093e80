"""Every parameter that users can give is read by somebody, or in the list of those without effect, or refused by name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from dataclasses import InitVar, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from nbengine import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams, fit
from nbengine.config import AsyncEngineArgs, EngineConfig
from nbengine.config.cache import CacheConfig
from nbengine.config.engine import NOT_OFFERED, WITHOUT_EFFECT, argument_names
from nbengine.config.model import ModelConfig
from nbengine.config.parallel import ParallelConfig
from nbengine.config.scheduler import SchedulerConfig
from nbengine.frontend.options import DType, EngineOptions, PathName
from nbengine.magics.engines.arguments import start_parser
from nbengine.sampling_params import PoolingParams, StructuredOutputsParams
from tests.unit.parameters.argument_flow import ArgumentFlow
from tests.unit.parameters.field_reads import Reads, Types, field_reads

ROOT = Path(__file__).parents[3]
CLASSES: list[type[Any]] = [
    *(EngineArgs, EngineConfig, ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig),
    *(SamplingParams, PoolingParams, StructuredOutputsParams),
]
ONLY_SHOW_OR_REFUSE = (
    "nbengine/cli.py",
    "nbengine/frontend/fit.py",
    "nbengine/engine/fit_probe.py",
    "nbengine/engine/bounds.py",
)
"""Files whose reads have no effect on an engine that starts."""
READ_BY_NAME = {
    ("StructuredOutputsParams", name): ("StructuredOutputsParams", "constraint")
    for name in ("json", "regex", "choice", "grammar", "json_object")
}
"""Fields that a property finds by their names, and the property."""
PARTS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, EngineConfig)
COPIED = {
    ("EngineArgs", f.name): (
        next(cls for cls in PARTS if f.name in cls.__dataclass_fields__).__name__,
        f.name,
    )
    for f in fields(EngineArgs)
}
"""Engine arguments, and the fields that they are copied to by their names."""
READ_BY_USERS = {("SamplingParams", "extra_args"): "the parameters of the user's own logits processors"}


def trees_below(root: Path) -> dict[str, ast.Module]:
    """The engine and its clients: what a notebook's magics and pictures read shows a value, and does nothing with it."""
    paths = (path.relative_to(root) for path in sorted((root / "nbengine").rglob("*.py")))
    mine = [path for path in paths if path.parts[1] not in ("magics", "widgets", "kernels")]
    return {str(path): ast.parse((root / path).read_text()) for path in mine}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return trees_below(ROOT)


@pytest.fixture(scope="module")
def types(trees: dict[str, ast.Module]) -> Types:
    return Types(trees.values())


def reads_of(trees: dict[str, ast.Module], types: Types, classes: Iterable[str]) -> Reads:
    reads = field_reads(trees, types, classes)
    for places in reads.places.values():
        places[:] = [place for place in places if place.rpartition(":")[0] not in ONLY_SHOW_OR_REFUSE]
    return reads


def field_names(cls: type[Any]) -> list[str]:
    return [f.name for f in fields(cls)] if is_dataclass(cls) else list(cls.__struct_fields__)


def test_every_field_is_read(trees: dict[str, ast.Module], types: Types) -> None:
    reads = reads_of(trees, types, [cls.__name__ for cls in CLASSES])
    exempt = READ_BY_USERS.keys()
    every = [(cls.__name__, name) for cls in CLASSES for name in field_names(cls)]
    idle = [
        key for key in every if key not in exempt and not reads.used(*(READ_BY_NAME | COPIED).get(key, key))
    ]
    assert idle == []
    assert exempt <= set(every)


def test_each_constraint_is_found_by_its_name() -> None:
    values = {"json": "{}", "regex": "a", "choice": ["a"], "grammar": "a", "json_object": True}
    assert {("StructuredOutputsParams", name) for name in values} == READ_BY_NAME.keys()
    for name, value in values.items():
        assert StructuredOutputsParams(**{name: value}).constraint == (name, value)


def public_callables() -> list[tuple[str | None, str]]:
    found: set[tuple[str | None, str]] = {(None, "fit")}
    for cls in (LLM, AsyncLLM, LLMEngine):
        for name, member in inspect.getmembers(cls, inspect.isroutine):
            if name == "__init__" or not name.startswith("_"):
                function = inspect.unwrap(getattr(member, "__func__", member))
                # A second name of a method has the first one's.
                owner, _, own_name = function.__qualname__.rpartition(".")
                # What `nbengine.client.calls` declares is a function there, and a method only here.
                found.add((owner or None, own_name))
    return sorted(found, key=str)


def test_every_argument_of_the_interface_is_used(trees: dict[str, ast.Module], types: Types) -> None:
    flow = ArgumentFlow(trees.values(), types)
    every = [(key, name) for key in public_callables() for name in flow.parameters(key)]
    assert {name for _, name in every} >= {"prompts", "use_tqdm", "messages", "priority", "pooling_params"}
    assert [(key, name) for key, name in every if not flow.uses(key, name)] == []


GIVEN = {
    "model": "another",
    "tokenizer": "./tokens",
    "tokenizer_mode": "slow",
    "chat_template": "{{ messages }}",
    "generation_config": "none",
    "dtype": "bfloat16",
    "quantization": "int8",
    "activation_dtype": "int16",
    "load_format": "gguf",
    "model_impl": "nbengine",
    "device": "cpu",
    "max_model_len": 77,
    "seed": 5,
    "enforce_eager": True,
    "hf_overrides": {"a": 1},
    "revision": "main",
    "block_size": 32,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 12345,
    "num_gpu_blocks_override": 99,
    "enable_prefix_caching": False,
    "kv_cache_dtype": "int8",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 444,
    "enable_chunked_prefill": False,
    "long_prefill_token_threshold": 17,
    "scheduling_policy": "priority",
    "async_scheduling": False,
    "stream_interval": 4,
    "logits_processors": ("a:B",),
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 3,
    "data_parallel_size": 4,
    "enable_expert_parallel": True,
    "distributed_executor_backend": "mp",
    "data_parallel_backend": "ray",
    "distributed_init_method": "tcp://127.0.0.1:1",
    "data_parallel_address": "127.0.0.1",
    "data_parallel_prefix_affinity": True,
    "ray_address": "auto",
    "ray_timeout": 7.0,
    "ray_cpus_per_worker": 2,
    "keep_alive": 8.0,
    "lease": 9.0,
    "client_backlog_bytes": 1000,
    "profile_dir": "traces",
    "step_timeout": 10.0,
    "metrics_port": 9400,
}
"""A value for each argument that is not its default."""


def test_every_engine_argument_arrives_in_the_configuration() -> None:
    assert set(GIVEN) == {f.name for f in fields(EngineArgs)}
    config = EngineArgs(**GIVEN).create_engine_config(bound=False)
    parts = {type(part): part for part in (config.model, config.cache, config.scheduler, config.parallel)}
    parts[EngineConfig] = config
    for name, value in GIVEN.items():
        assert value != getattr(EngineArgs, name), name
        home = config.model if name == "model" else next(p for k, p in parts.items() if hasattr(p, name))
        assert getattr(home, name) == value, name
    assert config.bound is False


def test_whole_numbers_arrive_as_floats_where_seconds_are_asked_for() -> None:
    config = EngineArgs(keep_alive=8, lease=9, step_timeout=10, ray_timeout=7).create_engine_config(
        bound=True
    )
    seconds = (config.keep_alive, config.lease, config.step_timeout, config.parallel.ray_timeout)
    assert [type(value) for value in seconds] == [float] * 4


@pytest.mark.parametrize("function", [LLM, AsyncLLM, fit])
def test_keywords_are_engine_arguments_or_the_functions_own(function: Callable[..., Any]) -> None:
    taken = set(inspect.signature(function).parameters)
    original = inspect.unwrap(function.__init__ if isinstance(function, type) else function)
    own = set(
        original.__code__.co_varnames[: original.__code__.co_argcount + original.__code__.co_kwonlyargcount]
    )
    assert taken == set(argument_names()) | own - {"self"}


def test_what_is_without_effect_stands_in_one_list_everywhere() -> None:
    init = set(inspect.signature(EngineArgs.__init__).parameters) - {"self"}
    assert init - {f.name for f in fields(EngineArgs)} == set(WITHOUT_EFFECT)
    assert not NOT_OFFERED & init
    assert AsyncEngineArgs is EngineArgs
    flags = ["--" + name.replace("_", "-") for name in WITHOUT_EFFECT]
    for command in ("start", "restart", "load", "fit"):
        (line,) = [line for line in start_parser(command).format_help().splitlines() if flags[0] in line]
        assert line == f"accepted, but without effect: {', '.join(flags)}"


def test_the_keywords_that_editors_complete_are_the_engine_arguments_with_their_types() -> None:
    declared = get_type_hints(EngineArgs)
    expected = {
        name: hint.type if isinstance(hint, InitVar) else hint
        for name, hint in declared.items()
        if name != "model"
    }
    # What stands for a string, `EngineArgs` makes one.
    expected |= dict.fromkeys(("tokenizer", "chat_template", "profile_dir"), PathName | None)
    expected["dtype"] = str | DType
    assert get_type_hints(EngineOptions) == expected
    assert not EngineOptions.__required_keys__


@pytest.mark.parametrize("function", [LLM, AsyncLLM, fit])
def test_help_shows_the_engine_arguments_with_their_types_and_defaults(function: Callable[..., Any]) -> None:
    shown = inspect.signature(function).parameters
    for name, parameter in inspect.signature(EngineArgs.__init__).parameters.items():
        if name != "self":
            # A path is a name of a model, too; `EngineArgs` makes a string of it.
            annotation = "PathName" if name == "model" else parameter.annotation
            assert (shown[name].annotation, shown[name].default) == (annotation, parameter.default)


SOURCE = """
class Params:
    read: int = 0
    by_property: int = 0
    copied: int = 0
    only_checked: int = 0
    only_cloned: int = 0
    shadowed: int = 0

    def __post_init__(self) -> None:
        check(self.only_checked)

    def _check(self) -> None:
        check(self.only_checked)

    @property
    def derived(self) -> int:
        return self.by_property + 1

    def make_config(self) -> "Config":
        return Config(size=self.copied, other=self.only_cloned)


class Config:
    size: int = 0
    other: int = 0


class Unrelated:
    shadowed: int = 0


class Engine:
    def __init__(self, config: Config) -> None:
        self._config = config

    def run(self, requests: list[Params], unrelated: Unrelated) -> int:
        size = self._config.size
        return sum(own.read + own.derived + unrelated.shadowed for own in requests) + size


def clone(params: Params) -> Params:
    return Params(only_cloned=params.only_cloned)


class Frontend:
    engine: Engine

    def generate(self, prompt: str, used: int, dropped: int, handed: int, positional: int) -> int:
        return self._send(prompt, positional, used=used, handed=handed, dropped=dropped)

    def _send(self, prompt: str, positional: int, *, used: int, handed: int, dropped: int) -> int:
        del dropped
        return self._last(prompt, used, handed)

    def _last(self, prompt: str, used: int, handed: int) -> int:
        return len(prompt) + used
"""


def test_a_field_that_is_only_checked_or_copied_is_found_out() -> None:
    tree = {"source.py": ast.parse(SOURCE)}
    reads = field_reads(tree, Types(tree.values()), ["Params", "Config"])
    every = ["read", "by_property", "copied", "only_checked", "only_cloned", "shadowed"]
    assert [name for name in every if reads.used("Params", name)] == ["read", "by_property", "copied"]
    assert [name for name in ("size", "other") if reads.used("Config", name)] == ["size"]


def test_an_argument_that_is_dropped_on_its_way_is_found_out() -> None:
    tree = ast.parse(SOURCE)
    flow = ArgumentFlow([tree], Types([tree]))
    key = ("Frontend", "generate")
    used = [name for name in flow.parameters(key) if flow.uses(key, name)]
    assert used == ["prompt", "used"]
