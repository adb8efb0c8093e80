"""Sampling parameters: normalised, checked, and independent of their clones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.sampling_params import (
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("allowed_token_ids", []),
    ("bad_words", ["a", ""]),
    ("bad_words", [" "]),
    ("frequency_penalty", 2.5),
    ("logprobs", -1),
    ("logprobs", 21),
    ("max_tokens", 0),
    ("min_p", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 2**31),
    ("n", 0),
    ("n", 16385),
    ("n", 2**70),
    ("output_kind", 9),
    ("presence_penalty", -2.5),
    ("prompt_logprobs", 21),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 2**70),
    ("seed", -1),
    ("seed", 2**63),
    ("temperature", -0.1),
    ("temperature", float("inf")),
    ("temperature", float("nan")),
    ("temperature", 2**70),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("truncate_prompt_tokens", 0),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{name} must be ") as raised:
        SamplingParams(**{name: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("n", True),
        ("seed", "x"),
        ("ignore_eos", 1),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("bad_words", "word"),
        ("allowed_token_ids", ["a"]),
        ("allowed_token_ids", 5),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("extra_args", ["x"]),
        ("extra_args", {1: 2}),
    ],
)
def test_a_wrong_type_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(InvalidTypeError, match=rf"^{name} must be "):
        SamplingParams(**{name: value})


def test_spellings_of_the_field_are_taken() -> None:
    params = SamplingParams(stop="end", stop_token_ids=(1, 2), top_k=-1, output_kind=1, bad_words=None)
    assert params.stop == ["end"]
    assert params.stop_token_ids == [1, 2]
    assert params.top_k == 0
    assert params.output_kind is RequestOutputKind.DELTA
    assert params.bad_words == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {7: "x"}}, r"logit_bias\[7\] must be a number, got 'x'"),
        ({"logit_bias": {7: float("inf")}}, r"logit_bias\[7\] must be finite, got inf"),
        ({"logit_bias": {7: -1e39}}, r"logit_bias\[7\] must be at most 1e\+30 in size, got -1e\+39"),
        ({"temperature": 1e39}, r"temperature must be at most 1e\+30 in size, got 1e\+39"),
        ({"repetition_penalty": 1e39}, r"repetition_penalty must be at most 1e\+30 in size"),
        ({"repetition_penalty": 1e-300}, r"repetition_penalty must be at least 1e-30, got 1e-300"),
        ({"extra_args": {"a": [1, {"b": object}]}}, r"extra_args\['a'\]\[1\]\['b'\] must be None, True"),
        ({"extra_args": {"a": {2: 1}}}, r"extra_args\['a'\] must be a dict with strings as keys, got 2"),
        ({"extra_args": {"a": 2**64}}, r"extra_args\['a'\] must be an integer of 64 bits"),
    ],
)
def test_a_wrong_value_inside_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SamplingParams(**options)


def test_plain_values_of_every_kind_are_taken_as_extra_arguments() -> None:
    values = {"a": None, "b": [True, 1, -(2**63), 2**64 - 1, 0.5, float("nan")], "c": {"d": b"x"}, "e": "y"}
    params = SamplingParams(extra_args=values)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert repr(decoded.extra_args) == repr(values)


def test_contradictions_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="min_tokens must be at most max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(InvalidArgumentError, match="stop must be empty when detokenize=False"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(InvalidArgumentError, match="stop must be without empty strings"):
        SamplingParams(stop=["a", ""])
    with pytest.raises(InvalidArgumentError, match="n must be 1 when using greedy sampling, got 2"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InvalidArgumentError, match="structured_outputs must be exactly one of"):
        StructuredOutputsParams(regex="a", json_object=True)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-4, False), (1.0, False)])
def test_a_vanishing_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_a_clone_shares_nothing_that_can_change() -> None:
    params = SamplingParams(
        stop=["a"],
        stop_token_ids=[1],
        bad_words=["b"],
        bad_words_token_ids=[[1, 2]],
        allowed_token_ids=[1],
        logit_bias={1: 2.0},
        structured_outputs=StructuredOutputsParams(json={"enum": [1]}),
        extra_args={"x": [1]},
    )
    clone = params.clone()
    assert clone == params
    assert msgspec.msgpack.encode(clone) == msgspec.msgpack.encode(params)
    assert not (changeable(clone) & changeable(params))


def changeable(value: Any) -> set[int]:
    """Identities of the lists and dicts in a value."""
    if isinstance(value, msgspec.Struct):
        return set().union(*(changeable(getattr(value, name)) for name in value.__struct_fields__))
    if isinstance(value, dict):
        return {id(value)}.union(*map(changeable, value.values()))
    return {id(value)}.union(*map(changeable, value)) if isinstance(value, list) else set()


def test_a_clone_is_checked_again() -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(InvalidArgumentError, match="temperature"):
        params.clone()


@pytest.mark.parametrize(
    ("options", "has"),
    [
        ({}, False),
        ({"presence_penalty": 0, "repetition_penalty": 1}, False),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 0.9}, True),
    ],
)
def test_penalties_are_on_or_off(options: dict[str, float], has: bool) -> None:
    assert SamplingParams(**options).has_penalties is has


def test_parameters_survive_the_wire() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, stop=["x"], seed=2**63 - 1, logit_bias={7: -1.5})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (
            SamplingParams,
            "temprature",
            "SamplingParams has no argument 'temprature'; did you mean temperature?",
        ),
        (
            SamplingParams,
            "max_new_tokens",
            "SamplingParams has no argument 'max_new_tokens'; did you mean max_tokens?",
        ),
        (PoolingParams, "normalise", "PoolingParams has no argument 'normalise'; did you mean normalize?"),
        (
            StructuredOutputsParams,
            "choices",
            "StructuredOutputsParams has no argument 'choices'; did you mean choice?",
        ),
    ],
)
def test_a_misspelt_argument_gets_the_one_that_was_meant(make: type[Any], name: str, message: str) -> None:
    with pytest.raises(InvalidTypeError) as raised:
        make(**{name: 1})
    assert str(raised.value) == message
    assert isinstance(raised.value, TypeError)
    with pytest.raises(InvalidTypeError, match="no argument 'zzz'; there are "):
        make(zzz=1)
