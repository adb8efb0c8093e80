"""`/v1/completions`: prompts and parameters of a body, and the answer's two forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbengine.outputs import RequestOutput
from nbengine.sampling_params import MAX_LOGPROBS, SamplingParams
from nbengine.server.protocol.completions import CompletionRequest
from nbengine.server.protocol.errors import bad_request
from nbengine.server.translate.answers import AnswerPart
from nbengine.server.translate.chat_events import delta_of
from nbengine.server.translate.logprobs import CompletionLogprobs
from nbengine.server.translate.sampling import DEFAULT_COMPLETION_TOKENS, sampling_params
from nbengine.server.translate.usage import Usage, prompt_progress


def check_available(request: CompletionRequest) -> None:
    """Raise the error for options that are not offered, and for those that contradict each other."""
    if request.suffix:
        raise bad_request(
            "suffix is not available: text goes on at its end", "suffix", "unsupported_parameter"
        )
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request(
            f"best_of must be n ({request.n or 1}), got {request.best_of}: all completions are returned",
            "best_of",
            "unsupported_value",
        )
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options are for a stream: set stream", "stream_options", "invalid_value")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise bad_request(
            f"logprobs must be in [0, {MAX_LOGPROBS}], got {request.logprobs}", "logprobs", "invalid_value"
        )


def prompts_of(request: CompletionRequest) -> list[dict[str, Any]]:
    """Return the prompts of a body, each a text or token ids, in the form that the engine takes.

    Raises:
        ApiError: there is none, or texts and numbers are mixed.
    """
    given = request.prompt
    if isinstance(given, str):
        found: list[str | list[int]] = [given]
    elif given and all(isinstance(item, int) for item in given):
        found = [[item for item in given if isinstance(item, int)]]
    else:
        found = [item for item in given if isinstance(item, str | list)]
        kinds = {type(item) for item in given}
        if len(kinds) != 1 or int in kinds:
            raise bad_request(
                "prompt must be a text, a list of texts, a list of token ids, or a list of such lists, not empty",
                "prompt",
                "invalid_value",
            )
    salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
    return [
        {"prompt": item, **salt} if isinstance(item, str) else {"prompt_token_ids": item, **salt}
        for item in found
    ]


def with_tokens(
    prompts: Sequence[dict[str, Any]], encode: Callable[[str], list[int]]
) -> list[dict[str, Any]]:
    """Return the prompts with the tokens that `encode` makes of their texts, which stay beside them."""
    return [
        {**prompt, "prompt_token_ids": encode(prompt["prompt"])} if "prompt" in prompt else prompt
        for prompt in prompts
    ]


def completion_params(request: CompletionRequest, recommended: Mapping[str, Any]) -> SamplingParams:
    """Make the sampling parameters.

    Raises:
        ApiError, InvalidArgumentError: a field has a value that is not allowed.
    """
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and request.echo:
        # The prompt alone is wanted; the one token that the engine makes is dropped.
        max_tokens = 1
    params = sampling_params(request, recommended, max_tokens=max_tokens, logprobs=request.logprobs)
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = request.logprobs
    return params


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """The form of an answer: what its parts share, and what its caller wants to see."""

    id: str
    created: int
    model: str
    logprobs: int | None = None
    echo: bool = False
    prompt_only: bool = False
    """Nothing but the prompt is wanted (`max_tokens` 0)."""
    usage_chunk: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    per_prompt: int = 1


class Completion:
    """The state machine that makes the chunks of a stream, and the whole of them.

    Args:
        form: what the parts share.
        first_outputs: the first output for each prompt, filled as they come.
        decode: writes tokens as text, of prompts that are given as tokens.
    """

    def __init__(
        self,
        form: CompletionForm,
        first_outputs: Mapping[int, RequestOutput],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._form = form
        self._first_outputs = first_outputs
        self._decode = decode
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def chunk(self, part: AnswerPart, usage: Usage | None = None) -> dict[str, Any] | None:
        """Return the chunk for a part, None if it says nothing."""
        if part.prompt_progress is not None:
            choice = {"index": part.index, "text": "", "logprobs": None, "finish_reason": None}
            return {**self._body([choice]), "prompt_progress": prompt_progress(part.prompt_progress)}
        choice = self._choice(part)
        if not (choice["text"] or choice["finish_reason"] or choice["logprobs"] or self._form.token_ids):
            return None
        body = self._body([choice])
        if self._form.usage_chunk:
            body["usage"] = None if usage is None else self._usage(usage)
        return body

    def end(self, usage: Usage) -> dict[str, Any] | None:
        """Return the last chunk, None unless usage is wanted."""
        return {**self._body([]), "usage": self._usage(usage)} if self._form.usage_chunk else None

    def add(self, part: AnswerPart) -> None:
        """Take in a part of the whole."""
        choice = self._choice(part)
        known = self._choices.setdefault(part.index, choice)
        if known is not choice:
            known["text"] += choice["text"]
            known["finish_reason"] = choice["finish_reason"] or known["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    known["logprobs"][name] += values

    def response(self, usage: Usage) -> dict[str, Any]:
        """Return the body of the response."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {**self._body(choices), "usage": self._usage(usage)}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        if self._form.prompt_only:
            usage = Usage(usage.prompt_tokens, usage.cached_tokens)
        return usage.openai()

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        form = self._form
        return {
            "id": form.id,
            "object": "text_completion",
            "created": form.created,
            "model": form.model,
            "choices": choices,
        }

    def _choice(self, part: AnswerPart) -> dict[str, Any]:
        form = self._form
        is_first = part.index not in self._logprobs
        if is_first:
            self._logprobs[part.index] = CompletionLogprobs(form.logprobs or 0)
        delta = delta_of(part.deltas)
        text = "" if delta is None or delta.content is None or form.prompt_only else delta.content
        logprobs = None
        entries: list[Any] = [] if form.prompt_only else list(part.logprobs or ())
        choice: dict[str, Any] = {"index": part.index, "text": text, "logprobs": None}
        if is_first and form.echo:
            output = self._first_outputs[part.index // form.per_prompt]
            choice["text"] = self._prompt_text(output) + text
            if form.logprobs is not None:
                texts = [self._decode([token]) for token in (output.prompt_token_ids or ())[:1]]
                logprobs = self._logprobs[part.index].part([*(output.prompt_logprobs or ()), *entries], texts)
        elif form.logprobs is not None and (entries or is_first):
            logprobs = self._logprobs[part.index].part(entries)
        choice["logprobs"] = logprobs
        reason = part.finish_reason
        choice["finish_reason"] = "length" if reason is not None and form.prompt_only else reason
        choice["stop_reason"] = None if form.prompt_only else part.stop_reason
        if form.token_ids:
            choice["token_ids"] = [] if form.prompt_only else part.token_ids
        if is_first and form.prompt_logprobs:
            choice["prompt_logprobs"] = part.prompt_logprobs
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._decode(output.prompt_token_ids or [])
