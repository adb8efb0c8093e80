"""What a request asks of the sampler and of its output."""

from __future__ import annotations

import copy
import enum
import json
import math
from collections.abc import Callable
from typing import Any

import msgspec

from nbengine.errors import InvalidArgumentError, InvalidTypeError

MAX_LOGPROBS = 20
POOLING_TASKS = ("embed", "classify", "score", "encode")
POOLING_TYPES = ("mean", "cls", "last")
MAX_SEED = 2**63 - 1
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32 logits."""


class RequestOutputKind(enum.IntEnum):
    """What each `RequestOutput` of a stream carries."""

    CUMULATIVE = 0
    """Everything generated so far, by all completions."""
    DELTA = 1
    """What is new since the previous output, of the completions that have anything new."""
    FINAL_ONLY = 2
    """Nothing until the request is finished."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """Constraint on the generated text; exactly one of the first five fields is set.

    `json` is a JSON schema: a dictionary, its text, or a pydantic model class. `regex` is matched against the whole
    output (the syntax of Rust's regex crate). `grammar` is in Lark's or GBNF's syntax. In JSON the output may have a
    space or an indented new line between its parts; `disable_any_whitespace` allows none, and
    `whitespace_pattern` is a regular expression of what is allowed.

    Raises:
        InvalidArgumentError: a field is empty, not JSON, or there is more than one constraint or none.
        InvalidTypeError: a field has the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in _CONSTRAINTS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidArgumentError(
                "structured_outputs", given, "exactly one of " + ", ".join(_CONSTRAINTS)
            )
        kind = given[0]
        value = getattr(self, kind)
        if kind == "json" and hasattr(value, "model_json_schema"):
            value = value.model_json_schema()
            msgspec.structs.force_setattr(self, "json", value)
        elif kind == "choice" and isinstance(value, tuple):
            value = list(value)
            msgspec.structs.force_setattr(self, "choice", value)
        _CONSTRAINTS[kind](f"structured_outputs.{kind}", value)
        self._check_whitespace(kind)

    def _check_whitespace(self, kind: str) -> None:
        if not isinstance(self.disable_any_whitespace, bool):
            raise InvalidTypeError("disable_any_whitespace", self.disable_any_whitespace, "True or False")
        if self.whitespace_pattern is not None:
            _require_text("structured_outputs.whitespace_pattern", self.whitespace_pattern)
            ok = kind in ("json", "json_object") and not self.disable_any_whitespace
            allowed = "None unless there is JSON that may have white space"
            _require("structured_outputs.whitespace_pattern", self.whitespace_pattern, ok, allowed)

    @property
    def constraint(self) -> tuple[str, Any]:
        """The name of the field that is set, and its value."""
        return next((kind, value) for kind in _CONSTRAINTS if (value := getattr(self, kind)) is not None)


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sampling parameters of one request, validated on construction.

    `temperature=0` is greedy. `top_k` of 0 or -1 and `min_p=0` and `top_p=1` switch the filter off.
    `max_tokens=None` means: up to the model's context length. `truncate_prompt_tokens=k` keeps the last k tokens
    of a prompt, -1 the last `max_model_len - 1`, which leave room for one of output. Of `n` completions, which need
    random sampling, the one with index i has the seed `seed + i`. `logprobs=K` asks for the log probability of each
    token and of the K likeliest in its place, `prompt_logprobs=K` for those of the prompt's tokens.

    Raises:
        InvalidArgumentError: a value is out of range (also a `ValueError`).
        InvalidTypeError: a value has the wrong type (also a `TypeError`).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: list[str] = []
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = None

    extra_args: dict[str, Any] | None = None
    """Parameters of custom logits processors: plain values."""

    eos_token_id: int | None = None
    """Filled in from the tokenizer and generation config before the request leaves the frontend."""
    bad_words_token_ids: list[list[int]] | None = None
    """Filled in by tokenizing `bad_words` before the request leaves the frontend."""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_types()
        self._check_ranges()

    def _normalise(self) -> None:
        stop: Any = self.stop
        if stop is None:
            self.stop = []
        elif isinstance(stop, str):
            self.stop = [stop]
        elif isinstance(stop, (tuple, set, frozenset)):
            self.stop = list(stop)
        for name in ("stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is None:
                setattr(self, name, [])
            elif not isinstance(value, (str, list)):
                setattr(self, name, list(value))
        allowed: Any = self.allowed_token_ids
        if isinstance(allowed, (tuple, set, frozenset, range)):
            self.allowed_token_ids = list(allowed)
        if self.top_k == -1:
            self.top_k = 0
        if type(self.output_kind) is not RequestOutputKind:
            self.output_kind = _checked_output_kind(self.output_kind)

    def _check_types(self) -> None:
        # Also run on the engine's side of the wire, for every request: a right type costs no call.
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not float or not math.isfinite(value):
                _require_number(name, value)
        for name in ("n", "top_k", "min_tokens"):
            value = getattr(self, name)
            if type(value) is not int:
                _require_int(name, value)
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                _require_int(name, value)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidTypeError(name, getattr(self, name), "True or False")
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise InvalidTypeError("structured_outputs", structured, "StructuredOutputsParams, or None")
        _require_list(self.stop, "stop", str, "a string or a list of strings")
        _require_list(self.bad_words, "bad_words", str, "a list of strings")
        _require_list(self.stop_token_ids, "stop_token_ids", int, "a list of token ids")
        if self.allowed_token_ids is not None:
            _require_list(self.allowed_token_ids, "allowed_token_ids", int, "a list of token ids")
        _check_logit_bias(self.logit_bias)
        _check_extra_args(self.extra_args)

    def _check_ranges(self) -> None:
        _require("n", self.n, self.n >= 1, "at least 1")
        _require("temperature", self.temperature, self.temperature >= 0, "a finite number, 0 or greater")
        _require("n", self.n, self.n == 1 or not self.is_greedy, "1 when using greedy sampling")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _require("top_k", self.top_k, self.top_k >= 0, "0 or -1 (off), or at least 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        if self.seed is not None:
            _require("seed", self.seed, 0 <= self.seed <= MAX_SEED, "in [0, 2**63)")
        if self.max_tokens is not None:
            _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1, or None")
            _require("min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, "at most max_tokens")
        _require("min_tokens", self.min_tokens, self.min_tokens >= 0, "0 or greater")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name, value, -2 <= value <= 2, "in [-2, 2]")
        _require("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "greater than 0")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require(name, value, 0 <= value <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}], or None")
        if self.truncate_prompt_tokens is not None:
            value = self.truncate_prompt_tokens
            _require("truncate_prompt_tokens", value, value == -1 or value >= 1, "-1, at least 1, or None")
        _require("stop", self.stop, all(self.stop), "without empty strings")
        _require("bad_words", self.bad_words, all(map(str.strip, self.bad_words)), "without empty strings")
        if self.allowed_token_ids is not None:
            allowed = self.allowed_token_ids
            _require("allowed_token_ids", allowed, bool(allowed), "at least one token id, or None")
        if self.stop and not self.detokenize:
            raise InvalidArgumentError("stop", self.stop, "empty when detokenize=False")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a random draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that have occurred are to be penalised or favoured."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing mutable with this one, checked again."""
        return msgspec.structs.replace(
            self,
            stop=list(self.stop),
            stop_token_ids=list(self.stop_token_ids),
            bad_words=list(self.bad_words),
            allowed_token_ids=copy.copy(self.allowed_token_ids),
            logit_bias=copy.copy(self.logit_bias),
            structured_outputs=copy.deepcopy(self.structured_outputs),
            extra_args=copy.deepcopy(self.extra_args),
            bad_words_token_ids=copy.deepcopy(self.bad_words_token_ids),
        )


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a pooling request asks for, validated on construction.

    Attributes:
        task: "embed" (one vector a prompt), "encode" (the hidden state of every token), "classify" or "score"
            (the model's classification head); None is the first of these that the model supports.
        pooling: "mean", "cls" (the first token) or "last", for "embed"; None is the model's own.
        normalize: scale vectors to length 1; None is the model's own for "embed", and False for "encode".
        dimensions: keep this many leading dimensions (Matryoshka embeddings), then normalise.
        use_activation: give probabilities instead of logits, for "classify" and "score"; None is True.
        truncate_prompt_tokens: keep the first tokens of longer prompts, special tokens included; -1 means
            `max_model_len`. None refuses prompts that are too long.

    Raises:
        InvalidArgumentError: a value is out of range (also a `ValueError`).
        InvalidTypeError: a value has the wrong type (also a `TypeError`).
    """

    task: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    second_segment_start: int | None = None
    """Filled in for a pair of texts: where in the prompt the second one begins."""

    def __post_init__(self) -> None:
        for name, allowed in (("task", POOLING_TASKS), ("pooling", POOLING_TYPES)):
            value = getattr(self, name)
            _require(name, value, value is None or value in allowed, f"None or one of {', '.join(allowed)}")
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise InvalidTypeError(name, value, "True, False or None")
        for name in ("dimensions", "truncate_prompt_tokens", "second_segment_start"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name))
        if self.dimensions is not None:
            _require("dimensions", self.dimensions, self.dimensions >= 1, "at least 1, or None")
        if self.truncate_prompt_tokens is not None:
            value = self.truncate_prompt_tokens
            _require("truncate_prompt_tokens", value, value >= 1 or value == -1, "at least 1, -1 or None")
        if self.second_segment_start is not None:
            value = self.second_segment_start
            _require("second_segment_start", value, value >= 0, "0 or greater, or None")

    def clone(self) -> PoolingParams:
        """Return an independent copy."""
        return msgspec.structs.replace(self)

    @property
    def needs_every_token(self) -> bool:
        """Whether the hidden states of other tokens than the last one matter; known once completed."""
        return self.task == "encode" or self.pooling != "last"


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _checked_output_kind(value: Any) -> RequestOutputKind:
    try:
        return RequestOutputKind(value)
    except ValueError:
        allowed = ", ".join(str(kind.value) for kind in RequestOutputKind)
        raise InvalidArgumentError("output_kind", value, f"one of {allowed}") from None


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise InvalidArgumentError(name, value, allowed)


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidTypeError(name, value, "a number")
    if not math.isfinite(value):
        raise InvalidArgumentError(name, value, "finite")


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(name, value, "an integer")


def _check_logit_bias(logit_bias: object) -> None:
    if logit_bias is None:
        return
    if not isinstance(logit_bias, dict):
        raise InvalidTypeError("logit_bias", logit_bias, "a dict from token ids to numbers, or None")
    for token_id, bias in logit_bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidTypeError("logit_bias", token_id, "a dict whose keys are token ids")
        _require_number(f"logit_bias[{token_id}]", bias)


def _check_extra_args(extra_args: object) -> None:
    if extra_args is None:
        return
    if not isinstance(extra_args, dict) or not all(isinstance(name, str) for name in extra_args):
        raise InvalidTypeError("extra_args", extra_args, "a dict with names as keys, or None")
    for name, value in extra_args.items():
        _check_plain(f"extra_args[{name!r}]", value)


def _check_plain(name: str, value: object) -> None:
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return
    if isinstance(value, int):
        _require(name, value, -(2**63) <= value < 2**64, "an integer of 64 bits")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidTypeError(f"{name}", key, "a dict with strings as keys")
            _check_plain(f"{name}[{key!r}]", item)
    else:
        raise InvalidTypeError(name, value, "None, True, False, a number, a string, bytes, a list or a dict")


def _require_list(value: object, name: str, kind: type, allowed: str) -> None:
    ok = isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
    if not ok:
        raise InvalidTypeError(name, value, allowed)


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidTypeError(name, value, "a string")
    _require(name, value, bool(value), "not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(name, value, f"text that can be written as UTF-8 ({error})") from error


def _require_json_schema(name: str, value: object) -> None:
    allowed = "a JSON schema: a dictionary, its text, or a pydantic model class"
    if not isinstance(value, (str, dict)):
        raise InvalidTypeError(name, value, allowed)
    try:
        if isinstance(value, str):
            value.encode()
            value = json.loads(value)
        else:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(name, value, f"{allowed} ({error})") from error
    _require(name, value, isinstance(value, dict), allowed)


def _require_choices(name: str, value: object) -> None:
    allowed = "a list of strings, none of them empty"
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise InvalidTypeError(name, value, allowed)
    _require(name, value, bool(value) and all(value), allowed)
    for choice in value:
        _require_text(name, choice)


def _require_true(name: str, value: object) -> None:
    if value is not True:
        raise InvalidTypeError(name, value, "True, or None")


_CONSTRAINTS: dict[str, Callable[[str, object], None]] = {
    "json": _require_json_schema,
    "regex": _require_text,
    "choice": _require_choices,
    "grammar": _require_text,
    "json_object": _require_true,
}
"""The kinds of constraints, and what checks each."""
