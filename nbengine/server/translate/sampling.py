"""Sampling parameters from the fields of a body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nbengine.checks import require
from nbengine.errors import InvalidArgumentError
from nbengine.sampling_params import (
    MAX_N,
    MAX_SEED,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from nbengine.server.protocol.errors import bad_request
from nbengine.server.protocol.fields import Constraint, ResponseFormat, SamplingFields

DEFAULT_COMPLETION_TOKENS = 16
LARGEST_BIAS = 100
_SAME_NAMES = (
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "thinking_budget",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
"""The parameters that the model's generation config may set for a request that does not."""


def sampling_params(
    fields: SamplingFields,
    recommended: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Make the sampling parameters of a request; `recommended` are those of the model's generation config.

    Several completions without randomness are left to the caller: see `copies_of`.

    Raises:
        ApiError, InvalidArgumentError: a field has a value that is not allowed.
    """
    values: dict[str, Any] = {name: recommended[name] for name in _DEFAULTS if name in recommended}
    values |= {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.n is not None:
        # Completions without randomness are requests of their own, whose parameters do not say how many they are.
        require("n", fields.n, fields.n <= MAX_N, f"at most {MAX_N}")
        values["n"] = fields.n
    if fields.seed is not None:
        # OpenAI's seeds may be negative.
        require("seed", fields.seed, -(2**63) <= fields.seed < 2**63, "in [-2**63, 2**63)")
        values["seed"] = fields.seed & MAX_SEED
    if fields.logit_bias:
        values["logit_bias"] = _biases(fields.logit_bias)
    greedy_copies = (
        values.get("n", 1) > 1 and SamplingParams(temperature=values.get("temperature", 1.0)).is_greedy
    )
    if greedy_copies:
        del values["n"]
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=constraint(fields.response_format, fields.structured_outputs),
        output_kind=RequestOutputKind.DELTA if fields.stream else RequestOutputKind.FINAL_ONLY,
    )


def copies_of(fields: SamplingFields, params: SamplingParams) -> int:
    """Return how often each prompt is sent: `n` completions at temperature 0 are `n` requests, which all say
    the same."""
    return fields.n // params.n if fields.n is not None else 1


def constraint(asked: ResponseFormat | None, own: Constraint | None) -> StructuredOutputsParams | None:
    """Return the constraint of an answer, None if there is none.

    Raises:
        ApiError: there are two, or a schema is missing.
    """
    from_format = None if asked is None else _of_format(asked)
    if own is None:
        return from_format
    if from_format is not None:
        raise bad_request(
            "response_format and structured_outputs cannot both constrain the answer",
            "structured_outputs",
            "invalid_value",
        )
    given = {name: value for name, value in msgspec.structs.asdict(own).items() if value is not None}
    return StructuredOutputsParams(**given)


def _of_format(asked: ResponseFormat) -> StructuredOutputsParams | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema = None if asked.json_schema is None else asked.json_schema.schema
    if schema is None:
        raise bad_request(
            "response_format.json_schema.schema is missing",
            "response_format.json_schema.schema",
            "missing_required_parameter",
        )
    return StructuredOutputsParams(json=schema)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidArgumentError("logit_bias", key, "a map from token ids to numbers")
        if not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            raise InvalidArgumentError("logit_bias", bias, f"in [-{LARGEST_BIAS}, {LARGEST_BIAS}]")
        biases[int(key)] = bias
    return biases
