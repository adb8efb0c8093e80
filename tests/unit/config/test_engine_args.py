"""Engine arguments: checked one by one, and the same after a trip through JSON."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import pytest

from nbengine.config import EngineArgs, EngineConfig
from nbengine.errors import InvalidArgumentError, InvalidTypeError, NotSupportedError

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("block_size", 0),
    ("block_size", 24),
    ("block_size", 512),
    ("data_parallel_size", 0),
    ("device", "tpu"),
    ("chat_template", "no-such-file.jinja"),
    ("dtype", "int3"),
    ("generation_config", "mine"),
    ("gpu_memory_utilization", 0.0),
    ("gpu_memory_utilization", 1.01),
    ("keep_alive", -1.0),
    ("keep_alive", 2**70),
    ("kv_cache_dtype", "fp8"),
    ("kv_cache_memory_bytes", 0),
    ("kv_cache_memory_bytes", 2**63),
    ("lease", 0.0),
    ("load_format", "pickle"),
    ("model_impl", "vllm"),
    ("long_prefill_token_threshold", -1),
    ("long_prefill_token_threshold", 2**31),
    ("max_model_len", 0),
    ("max_model_len", 2**31),
    ("max_num_batched_tokens", 0),
    ("max_num_seqs", 0),
    ("max_num_seqs", 2**70),
    ("model", ""),
    ("num_gpu_blocks_override", 0),
    ("num_gpu_blocks_override", 2**31),
    ("pipeline_parallel_size", 0),
    ("pipeline_parallel_size", 2**31),
    ("quantization", "fp8"),
    ("activation_dtype", "int8"),
    ("ray_address", "ray://10.0.0.1:10001"),
    ("ray_address", ""),
    ("ray_cpus_per_worker", 0),
    ("ray_timeout", 0.0),
    ("runner", "draft"),
    ("scheduling_policy", "lottery"),
    ("seed", -1),
    ("step_timeout", -0.5),
    ("step_timeout", float("nan")),
    ("step_timeout", float("inf")),
    ("stream_interval", 0),
    ("tensor_parallel_size", 0),
    ("tokenizer_mode", "mistral"),
]
NOT_YET: list[tuple[str, Any]] = [
    ("enable_lora", True),
    ("speculative_config", {"method": "ngram"}),
]


def config_of(**arguments: Any) -> EngineConfig:
    return EngineArgs.from_kwargs(arguments).create_engine_config(bound=True)


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{name} must be .*, got {value!r}$"):
        config_of(**{name: value})


def test_several_pipeline_stages_do_not_schedule_ahead() -> None:
    stages = {"model": "random-tiny", "pipeline_parallel_size": 2}
    with pytest.raises(InvalidArgumentError, match="async_scheduling must be None or False with 2 pipeline"):
        EngineArgs(**stages, async_scheduling=True).create_engine_config(bound=True)
    for off in (None, False):
        config = EngineArgs(**stages, async_scheduling=off).create_engine_config(bound=True)
        assert config.scheduler.async_scheduling is off


@pytest.mark.parametrize("name", ["", "module", "module:", ":Class", "a:b:c", 5])
def test_a_logits_processor_is_named_by_module_and_class(name: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match='logits_processors must be made of strings "module:Class"'
    ):
        config_of(logits_processors=[name])
    assert config_of(logits_processors=("a:B",)).model.logits_processors == ("a:B",)


@pytest.mark.parametrize(("name", "value"), NOT_YET)
def test_what_is_not_there_yet_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(NotSupportedError, match=name):
        config_of(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", "8"),
        ("max_num_seqs", True),
        ("enable_prefix_caching", 1),
        ("chat_template", 5),
        ("dtype", 32),
    ],
)
def test_a_wrong_type_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(InvalidTypeError, match=name) as raised:
        config_of(**{name: value})
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ValueError)


def test_a_misspelt_argument_gets_the_one_that_was_meant() -> None:
    meant = "^EngineArgs has no argument 'max_modellen'; did you mean max_model_len\\?$"
    for make in (EngineArgs.from_kwargs, lambda keywords: EngineArgs(**keywords)):
        with pytest.raises(InvalidTypeError, match=meant):
            make({"max_modellen": 1})
        with pytest.raises(
            InvalidTypeError, match="no argument 'zzz'; there are activation_dtype, async_scheduling, "
        ):
            make({"zzz": 1})
        with pytest.raises(InvalidTypeError, match="did you mean trust_remote_code"):
            make({"trust_remotecode": True})
        with pytest.raises(NotSupportedError, match="enable_lora is not offered"):
            make({"enable_lora": True})
    assert (
        copy.deepcopy(EngineArgs(seed=3))
        == pickle.loads(pickle.dumps(EngineArgs(seed=3)))
        == EngineArgs(seed=3)
    )


def test_a_step_timeout_leaves_starts_and_loads_their_time_and_0_leaves_everything_its_own() -> None:
    default, short, long = (config_of(step_timeout=s).progress_deadlines for s in (300, 2, 7200))
    kinds = ("start", "load", "call", "step", "idle")
    assert [default.to_end(kind) for kind in kinds] == [300, 600, 600, 300, 300]
    assert [short.to_end(kind) for kind in kinds] == [300, 600, 600, 2, 2]
    assert [long.to_end(kind) for kind in kinds] == [7200] * 5
    assert [default.to_report(kind) for kind in kinds] == [60, 30, 10, 10, 10]
    assert short.to_report("step") == 0.5
    assert short.pulse_interval < short.to_report("step") / 2
    none = config_of(step_timeout=0).progress_deadlines
    assert {none.to_end(kind) for kind in kinds} == {none.to_report(kind) for kind in kinds} == {math.inf}


def test_an_integer_serves_as_a_float() -> None:
    assert config_of(keep_alive=5).keep_alive == 5.0


def test_the_arguments_that_existing_scripts_pass_are_taken() -> None:
    arguments = {
        "runner": "pooling",
        "enable_sleep_mode": True,
        "disable_log_stats": True,
        "enable_prompt_embeds": True,
    }
    assert config_of(**arguments, dtype="half").model.dtype == "float16"
    # Nothing of them is kept.
    assert config_of(**arguments) == config_of() == config_of(trust_remote_code=True)
    with pytest.raises(InvalidArgumentError, match="enable_sleep_mode must be one of True, False, got 'yes'"):
        config_of(enable_sleep_mode="yes")


def test_the_arguments_of_a_script_can_be_passed_on_as_keywords() -> None:
    args = EngineArgs(model="random-tiny", max_model_len=64)
    assert EngineArgs.from_kwargs(asdict(args)) == args


def test_a_configuration_survives_json() -> None:
    config = config_of(
        model="random-tiny",
        hf_overrides={"rope_theta": 1e6, "layers": [1, {"deep": None}]},
        kv_cache_memory_bytes=1 << 40,
        max_num_batched_tokens=17,
        distributed_executor_backend="a.module:Class",
        logits_processors=["a.module:Class"],
    )
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    assert config.scheduler.max_num_batched_tokens == 17
    assert config.parallel.distributed_executor_backend == "a.module:Class"


def test_a_class_that_is_derived_may_have_more_fields() -> None:
    @dataclass(frozen=True)
    class OwnArgs(EngineArgs):
        answers: int = 3

    args = OwnArgs("random-tiny", seed=5)
    assert (args.answers, args.create_engine_config(bound=True).model.seed) == (3, 5)
