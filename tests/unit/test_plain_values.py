"""Numbers and names as the field has them: NumPy's, torch's, fractions, paths are taken for what they stand for."""

from __future__ import annotations

import enum
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from nbengine.checks import require_bool, require_int, require_number
from nbengine.client import calls
from nbengine.client.routing.core_table import checked_rank
from nbengine.config import EngineArgs
from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.requests.input_processor import prompt_list
from nbengine.plain import is_ordered, plain, plain_list
from nbengine.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams


class Name(enum.StrEnum):
    A = "a"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.array(3), 3),
        (torch.tensor(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
        (np.True_, True),
        (torch.tensor(True), True),
        (np.str_("a"), "a"),
        (Name.A, "a"),
    ],
)
def test_what_stands_for_a_plain_value_becomes_it(value: object, wanted: object) -> None:
    assert (type(plain(value)), plain(value)) == (type(wanted), wanted)


@pytest.mark.parametrize(
    "value",
    [
        np.array([3]),
        torch.tensor([3]),
        np.complex64(1),
        np.datetime64("2026-01-01"),
        Fraction(10**400),
        b"3",
        [3],
        object(),
        1j,
    ],
)
def test_what_is_not_one_number_is_refused_by_name(value: object) -> None:
    for check in (require_int, require_number, require_bool):
        with pytest.raises(InvalidTypeError, match="limit"):
            check("limit", value)


def test_a_truth_value_is_no_number_whoever_made_it() -> None:
    for value in (True, np.True_, torch.tensor(True)):
        for check in (require_int, require_number):
            with pytest.raises(InvalidTypeError):
                check("n", value)
        assert require_bool("flag", value) is True
    for number in (0, np.int64(1)):
        with pytest.raises(InvalidTypeError):
            require_bool("flag", number)


def test_sampling_parameters_hold_plain_values_that_the_wire_can_carry() -> None:
    params = SamplingParams(
        n=np.int64(2),
        max_tokens=torch.tensor(3),
        seed=np.uint32(7),
        top_k=np.int32(-1),
        temperature=np.float32(0.5),
        top_p=Decimal("0.5"),
        ignore_eos=np.True_,
        stop=np.array(["a", "b"]),
        bad_words=(np.str_("c"),),
        stop_token_ids=np.array([3, 4]),
        allowed_token_ids=torch.tensor([5]),
        logit_bias={np.int64(3): np.float32(1)},
        extra_args={"scale": np.float64(0.5), "shape": (np.int64(1), 2)},
    )
    wanted = SamplingParams(
        n=2,
        max_tokens=3,
        seed=7,
        top_k=-1,
        temperature=0.5,
        top_p=0.5,
        ignore_eos=True,
        stop=["a", "b"],
        bad_words=["c"],
        stop_token_ids=[3, 4],
        allowed_token_ids=[5],
        logit_bias={3: 1.0},
        extra_args={"scale": 0.5, "shape": [1, 2]},
    )
    assert params == wanted
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == wanted
    pooling = PoolingParams(
        task=np.str_("embed"),
        dimensions=np.int64(8),
        normalize=np.False_,
        truncate_prompt_tokens=np.int64(-1),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(pooling), type=PoolingParams) == PoolingParams(
        task="embed", dimensions=8, normalize=False, truncate_prompt_tokens=-1
    )
    assert StructuredOutputsParams(choice=np.array(["a", "b"])).choice == ["a", "b"]
    assert type(StructuredOutputsParams(regex=Name.A).regex) is str


@pytest.mark.parametrize("name", ["n", "top_k", "max_tokens", "seed", "logprobs", "min_tokens"])
def test_a_number_with_a_fraction_is_no_count(name: str) -> None:
    with pytest.raises(InvalidTypeError, match=name):
        SamplingParams(**{name: np.float32(2)})


def test_engine_arguments_take_paths_types_of_torch_and_numbers_of_numpy(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": tmp_path,
        "dtype": torch.bfloat16,
        "seed": None,
        "max_model_len": np.int64(512),
        "gpu_memory_utilization": np.float32(0.5),
        "enable_prefix_caching": np.False_,
        "hf_overrides": {"rope_theta": np.float64(2), "sizes": (np.int64(1),)},
        "profile_dir": tmp_path,
    }
    config = EngineArgs(**given).create_engine_config(bound=True)
    assert (config.model.model, config.profile_dir) == (str(tmp_path), str(tmp_path))
    assert (config.model.dtype, config.model.seed, config.model.max_model_len) == ("bfloat16", 0, 512)
    assert config.cache.enable_prefix_caching is False
    assert config.model.hf_overrides == {"rope_theta": 2.0, "sizes": [1]}
    assert EngineArgs(dtype="torch.float16").create_engine_config(bound=True).model.dtype == "float16"
    for name, value in (
        ("model", b"x"),
        ("max_model_len", np.True_),
        ("seed", np.float32(1)),
        ("dtype", torch.int8),
    ):
        with pytest.raises(InvalidArgumentError, match=name):
            EngineArgs(**{name: value}).create_engine_config(bound=True)


def test_arrays_are_lists_of_prompts_or_of_one_prompts_tokens() -> None:
    assert prompt_list(np.array([72, 73])) == [[72, 73]]
    assert prompt_list([np.int64(72), np.int64(73)]) == [[72, 73]]
    assert prompt_list(range(2)) == [[0, 1]]
    assert [list(prompt) for prompt in prompt_list(torch.tensor([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
    assert prompt_list(np.array(["a", "b"])) == ["a", "b"]
    for value in (5, {1, 2}, (x for x in "ab"), b"ab", np.array(3)):
        with pytest.raises(InvalidTypeError, match="prompts"):
            prompt_list(value)  # type: ignore[arg-type]


def test_a_list_is_whatever_has_elements_but_no_text() -> None:
    assert plain_list(range(2)) == plain_list((0, np.int64(1))) == plain_list(iter([0, 1])) == [0, 1]
    for value in ("ab", b"ab", {"a": 1}, 5, None, np.array(3)):
        assert plain_list(value) is value
    assert not any(map(is_ordered, ("ab", {"a": 1}, {1}, iter([1]), 5)))


def test_calls_take_numbers_and_refuse_truth_values() -> None:
    assert checked_rank(np.int64(1), [0, 1]) == 1
    with pytest.raises(InvalidTypeError, match="data_parallel_rank"):
        checked_rank(True, [0, 1])
    caller: Any = None
    with pytest.raises(InvalidTypeError, match="max_steps"):
        calls.start_profile.arguments(caller, max_steps=True)
    assert calls.sleep.arguments(caller, np.int64(2)) == (2, None, False)
    with pytest.raises(InvalidTypeError, match="level"):
        calls.sleep.arguments(caller, True)
