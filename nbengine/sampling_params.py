"""The parameters of a request: of its sampling or pooling, and of its output."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable
from typing import Any

import msgspec

from nbengine.checks import (
    SuggestingMeta,
    checked_extra_args,
    checked_json_schema,
    checked_logit_bias,
    checked_texts,
    checked_token_ids,
    require,
    require_bool,
    require_choices,
    require_fits_logits,
    require_int,
    require_number,
    require_regex,
    require_text,
    require_true,
)
from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.json_schemas import schema_of
from nbengine.plain import plain, plain_list, plain_regex

MAX_LOGPROBS = 20
MAX_N = 16384
"""Most completions of one prompt: each is computed as a separate request."""
MAX_STOP_STRINGS = 1024
MAX_BAD_WORDS = 1024
MAX_TEXT_CHARACTERS = 65_536
"""Most characters of all strings in `stop` together, and of those in `bad_words`."""
MAX_TOKEN_IDS = 2**19
"""Most entries of `stop_token_ids`, `allowed_token_ids` and `logit_bias`: more than a vocabulary has."""
POOLING_TASKS = ("embed", "classify", "score", "encode")
POOLING_TYPES = ("mean", "cls", "last")
MAX_SEED = 2**63 - 1
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32 logits."""


class RequestOutputKind(enum.IntEnum):
    """The part of a request's output that each `RequestOutput` of a stream carries."""

    CUMULATIVE = 0
    """Everything generated so far, by all completions."""
    DELTA = 1
    """The text and tokens since the previous output, of the completions that have anything new."""
    FINAL_ONLY = 2
    """Nothing until the request is finished."""


class StructuredOutputsParams(
    msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True, metaclass=SuggestingMeta
):
    """Constraint on the generated text; exactly one of the first five fields is set.

    `json` is a JSON schema: a dictionary, its text, or a class (pydantic, dataclass, attrs, msgspec, TypedDict)
    or type that has one. What no grammar can keep of it (formats that JSON Schema does not define,
    `uniqueItems`, look-around in patterns) is named in a warning (`UnenforcedSchemaWarning`). `regex` is
    matched against the whole output (the syntax of Rust's regex crate, or what `re.compile` gives). `grammar` is in Lark's or GBNF's
    syntax. The text of a special token in a choice, a constant or a regular expression is text; a grammar can
    name the token itself (`<|name|>` without quotes). In JSON the output may have a space or an indented new
    line between its parts; `disable_any_whitespace` forbids these, and `whitespace_pattern` is a regular
    expression that says what is allowed there.

    Raises:
        InvalidArgumentError: a field is empty or not JSON, or there is not exactly one constraint.
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
        if kind == "json":
            value = checked_json_schema("structured_outputs.json", schema_of(value))
            msgspec.structs.force_setattr(self, "json", value)
            return self._check_whitespace(kind)
        elif kind == "regex":
            value = plain_regex(value)
            msgspec.structs.force_setattr(self, "regex", value)
        elif kind == "choice":
            value = plain_list(value)
            msgspec.structs.force_setattr(self, "choice", value)
        elif type(value) is not type(plain(value)):
            value = plain(value)
            msgspec.structs.force_setattr(self, kind, value)
        _CONSTRAINTS[kind](f"structured_outputs.{kind}", value)
        self._check_whitespace(kind)

    def _check_whitespace(self, kind: str) -> None:
        require_bool("disable_any_whitespace", self.disable_any_whitespace)
        if self.whitespace_pattern is not None:
            require_text("structured_outputs.whitespace_pattern", self.whitespace_pattern)
            ok = kind in ("json", "json_object") and not self.disable_any_whitespace
            allowed = "None unless there is JSON that may have white space"
            require("structured_outputs.whitespace_pattern", self.whitespace_pattern, ok, allowed)

    @property
    def constraint(self) -> tuple[str, Any]:
        """Return the name of the field that is set, and its value."""
        return next((kind, value) for kind in _CONSTRAINTS if (value := getattr(self, kind)) is not None)


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True, metaclass=SuggestingMeta):
    """Sampling parameters of one request, validated on construction.

    `temperature=0` is greedy. `top_k` of 0 or -1 and `min_p=0` and `top_p=1` switch the filter off.
    `max_tokens=None` means: up to the model's context length. `truncate_prompt_tokens=k` keeps the last k
    tokens of a prompt, -1 the last `max_model_len - 1`, which leave room for one token of output. Of `n`
    completions (16,384 at most), which need random sampling, the one with index i has the seed `seed + i`.
    `logprobs=K` asks for the log probability of each token and of the K likeliest in its place,
    `prompt_logprobs=K` for those of the prompt's tokens. `stop` and `bad_words` take 1,024 strings each, of
    65,536 characters together, `stop_token_ids`, `allowed_token_ids` and `logit_bias` 524,288 token ids each.
    A number may be one of NumPy or torch, a list a tuple or an array.
    The text of a special token, such as "<|im_end|>", ends the answer at that token if it is in `stop`, also where
    special tokens have no text, and forbids that token if it is in `bad_words`.
    `spaces_between_special_tokens=False` leaves out the spaces that a tokenizer of words puts between special
    tokens, where `skip_special_tokens=False` keeps these.

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
    thinking_budget: int | None = None
    """Most tokens of reasoning, which is then closed; only for prompts that say where reasoning is."""

    extra_args: dict[str, Any] | None = None
    """Parameters of custom logits processors: plain values."""

    eos_token_id: int | None = None
    """Filled in from the tokenizer and generation config before the request leaves the frontend."""
    bad_words_token_ids: list[list[int]] | None = None
    """Filled in by tokenizing `bad_words` before the request leaves the frontend."""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_sizes()
        self._check_types()
        self._check_ranges()

    def _normalise(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str):
            self.stop = [stop]
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                setattr(self, name, [])
        for name, _, _ in _SIZES:
            value = getattr(self, name)
            if type(value) is not list and value is not None:
                setattr(self, name, plain_list(value))
        if type(self.output_kind) is not RequestOutputKind:
            self.output_kind = _checked_output_kind(self.output_kind)

    def _check_sizes(self) -> None:
        # Sizes are checked first, so that no other check walks through a huge list.
        for name, most, what in _SIZES:
            value = getattr(self, name)
            if value and isinstance(value, (list, dict)) and len(value) > most:
                raise InvalidArgumentError(name, len(value), f"at most {most} {what}")

    def _check_types(self) -> None:
        # This also runs on the engine's side of the wire for every request: a right type costs no call.
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not float or not math.isfinite(value):
                setattr(self, name, require_number(name, value))
        for name in _INTEGERS:
            value = getattr(self, name)
            if type(value) is not int and (value is not None or name not in _MAY_BE_NONE):
                setattr(self, name, require_int(name, value))
        for name in _SWITCHES:
            if type(getattr(self, name)) is not bool:
                setattr(self, name, require_bool(name, getattr(self, name)))
        if self.top_k == -1:
            self.top_k = 0
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise InvalidTypeError("structured_outputs", structured, "StructuredOutputsParams, or None")
        self.stop = checked_texts("stop", self.stop, "a string or a list of strings")
        self.bad_words = checked_texts("bad_words", self.bad_words, "a list of strings")
        self.stop_token_ids = checked_token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = checked_token_ids("allowed_token_ids", self.allowed_token_ids)
        self.logit_bias = checked_logit_bias(self.logit_bias)
        self.extra_args = checked_extra_args(self.extra_args)

    def _check_ranges(self) -> None:
        require("n", self.n, self.n >= 1, "at least 1")
        require("n", self.n, self.n <= MAX_N, f"at most {MAX_N}")
        require("temperature", self.temperature, self.temperature >= 0, "a finite number, 0 or greater")
        require_fits_logits("temperature", self.temperature)
        require("n", self.n, self.n == 1 or not self.is_greedy, "1 when using greedy sampling")
        require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        require("top_k", self.top_k, self.top_k >= 0, "0 or -1 (off), or at least 1")
        require("top_k", self.top_k, self.top_k < 2**31, "below 2**31")
        require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        if self.seed is not None:
            require("seed", self.seed, 0 <= self.seed <= MAX_SEED, "in [0, 2**63)")
        if self.max_tokens is not None:
            require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1, or None")
            require("min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, "at most max_tokens")
        require("min_tokens", self.min_tokens, self.min_tokens >= 0, "0 or greater")
        require("min_tokens", self.min_tokens, self.min_tokens < 2**31, "below 2**31")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(name, value, -2 <= value <= 2, "in [-2, 2]")
        require("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "greater than 0")
        require_fits_logits("repetition_penalty", self.repetition_penalty)
        require(
            "repetition_penalty", self.repetition_penalty, self.repetition_penalty >= 1e-30, "at least 1e-30"
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                require(name, value, 0 <= value <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}], or None")
        if self.truncate_prompt_tokens is not None:
            value = self.truncate_prompt_tokens
            require("truncate_prompt_tokens", value, value == -1 or value >= 1, "-1, at least 1, or None")
        if self.thinking_budget is not None:
            budget = self.thinking_budget
            require("thinking_budget", budget, 0 <= budget < 2**31, "in [0, 2**31), or None")
        for name in ("stop", "bad_words"):
            if texts := getattr(self, name):
                num_characters = sum(map(len, texts))
                limit = f"of at most {MAX_TEXT_CHARACTERS} characters together"
                require(name, num_characters, num_characters <= MAX_TEXT_CHARACTERS, limit)
        require("stop", self.stop, all(self.stop), "without empty strings")
        require("bad_words", self.bad_words, all(map(str.strip, self.bad_words)), "without empty strings")
        if self.allowed_token_ids is not None:
            allowed = self.allowed_token_ids
            require("allowed_token_ids", allowed, bool(allowed), "at least one token id, or None")
        if self.stop and not self.detokenize:
            raise InvalidArgumentError("stop", self.stop, "empty when detokenize=False")

    @property
    def is_greedy(self) -> bool:
        """Tell whether the most likely token is taken, without a random draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Tell whether tokens that have occurred are penalised or favoured."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def is_plain(self) -> bool:
        """Tell whether each token is taken or drawn from the model's own logits, and nothing else is asked."""
        changes = self.logit_bias or self.bad_words or self.bad_words_token_ids or self.min_tokens
        return (
            not (changes or self.has_penalties) and self.allowed_token_ids is None and self.logprobs is None
        )

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


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True, metaclass=SuggestingMeta):
    """The parameters of one pooling request, validated on construction.

    Attributes:
        task: "embed" (one vector per prompt), "encode" (the hidden state of every token), "classify" or
            "score" (the model's classification head); None is the first of these that the model supports.
        pooling: "mean", "cls" (the first token) or "last", for "embed"; None is the model's own.
        normalize: scale vectors to length 1; None is the model's own for "embed", and False for "encode".
        dimensions: keep this many leading dimensions (Matryoshka embeddings), then normalise.
        use_activation: give probabilities instead of logits, for "classify" and "score"; None is True.
        truncate_prompt_tokens: keep the first tokens of longer prompts, special tokens included; fewer than
            the special tokens of a text or a pair are refused. -1 means `max_model_len`. None refuses prompts
            that are too long.

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
    """Filled in for a pair of texts: the position in the prompt at which the second one begins."""

    def __post_init__(self) -> None:
        for name, allowed in (("task", POOLING_TASKS), ("pooling", POOLING_TYPES)):
            value = plain(getattr(self, name))
            require(name, value, value is None or value in allowed, f"None or one of {', '.join(allowed)}")
            setattr(self, name, value)
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                setattr(self, name, require_bool(name, getattr(self, name), "True, False or None"))
        for name in ("dimensions", "truncate_prompt_tokens", "second_segment_start"):
            if getattr(self, name) is not None:
                setattr(self, name, require_int(name, getattr(self, name)))
        if self.dimensions is not None:
            require("dimensions", self.dimensions, self.dimensions >= 1, "at least 1, or None")
        if self.truncate_prompt_tokens is not None:
            value = self.truncate_prompt_tokens
            require("truncate_prompt_tokens", value, value >= 1 or value == -1, "at least 1, -1 or None")
        if self.second_segment_start is not None:
            value = self.second_segment_start
            require("second_segment_start", value, value >= 0, "0 or greater, or None")

    def clone(self) -> PoolingParams:
        """Return an independent copy."""
        return msgspec.structs.replace(self)

    @property
    def needs_every_token(self) -> bool:
        """Tell whether hidden states of other tokens than the last one matter.

        The answer holds once the frontend has filled in `task` and `pooling`.
        """
        return self.task == "encode" or self.pooling != "last"


_SIZES = (
    ("stop", MAX_STOP_STRINGS, "strings"),
    ("bad_words", MAX_BAD_WORDS, "strings"),
    ("stop_token_ids", MAX_TOKEN_IDS, "token ids"),
    ("allowed_token_ids", MAX_TOKEN_IDS, "token ids"),
    ("logit_bias", MAX_TOKEN_IDS, "token ids"),
)
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_MAY_BE_NONE = (
    "seed",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "thinking_budget",
)
_INTEGERS = ("n", "top_k", "min_tokens", *_MAY_BE_NONE)
_SWITCHES = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)


def _checked_output_kind(value: Any) -> RequestOutputKind:
    try:
        return RequestOutputKind(value)
    except (ValueError, RecursionError):
        allowed = ", ".join(str(kind.value) for kind in RequestOutputKind)
        raise InvalidArgumentError("output_kind", value, f"one of {allowed}") from None


_CONSTRAINTS: dict[str, Callable[[str, object], object]] = {
    "json": checked_json_schema,
    "regex": require_regex,
    "choice": require_choices,
    "grammar": require_text,
    "json_object": require_true,
}
"""The kinds of constraints, and the check of each."""
