"""This module makes requests for the engine core from prompts and parameters as callers give them."""

from __future__ import annotations

import functools
import importlib.util
import secrets
import time
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from nbengine.checks import checked_token_ids, require, require_int, require_utf8
from nbengine.config import EngineConfig
from nbengine.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    NotSupportedError,
    quoted,
)
from nbengine.frontend.requests.continuation import Continuation, continued
from nbengine.frontend.requests.generation_defaults import GenerationDefaults
from nbengine.frontend.requests.output_interval import default_interval
from nbengine.frontend.requests.pooling_inputs import PoolingInputs
from nbengine.frontend.requests.prompt_embeds import checked_embeds
from nbengine.frontend.requests.prompt_length import PromptLimit, TextEncoder
from nbengine.frontend.requests.reasoning import ReasoningInputs, ReasoningMarks
from nbengine.frontend.text.quoting import QuotingEncoder
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.json_schemas import warn_of_unenforced
from nbengine.models.configs.hf_config import (
    eos_token_ids,
    load_hf_config,
    positive,
    vocab_size,
)
from nbengine.plain import is_ordered, plain
from nbengine.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nbengine.frontend.requests.prompt_embeds import PromptEmbeds


class TextPrompt(TypedDict):
    """The fields of a prompt to be tokenized; prompts of different `cache_salt` share nothing in the prefix
    cache. `reasoning` has the marks around the reasoning of the answer, None if it has none."""

    prompt: str
    cache_salt: NotRequired[str]
    reasoning: NotRequired[ReasoningMarks | None]


class TokensPrompt(TypedDict):
    """The fields of a tokenized prompt; `prompt` is its text, where known, for the output to carry."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    reasoning: NotRequired[ReasoningMarks | None]


class EmbedsPrompt(TypedDict):
    """The fields of a prompt given as embeddings: a torch tensor or a numpy array [prompt tokens, hidden
    size] of finite floating-point numbers, which must not change before the request has ended. `prompt` is
    for the output to carry."""

    prompt_embeds: Any
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    reasoning: NotRequired[ReasoningMarks | None]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt | Mapping[str, Any]
"""A list of integers is a tokenized prompt, like `{"prompt_token_ids": ...}`."""

_PROMPT_KEYS = frozenset(("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "answer", "reasoning"))
_ALLOWED_PROMPT = 'a string, {"prompt": str}, {"prompt_token_ids": [int]} or {"prompt_embeds": tensor}'


class InputProcessor:
    """The processor that validates and tokenizes prompts and completes their sampling parameters, from any
    thread.

    `encoder` is one with the backend of `tokenizer`; `max_model_len` is the engine's limit on prompt and output
    tokens together.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerFast,
        encoder: TextEncoder,
        max_model_len: int,
        supported_tasks: Sequence[str] = ("generate",),
    ) -> None:
        directory = config.model.directory
        hf_config = load_hf_config(config.model)
        self.max_model_len = max_model_len
        self._policy = config.scheduler.scheduling_policy
        self.encoder = encoder
        self.chat_encoder = QuotingEncoder(self.encoder)
        self._id_to_token = tokenizer.backend_tokenizer.id_to_token
        self._reasoning = ReasoningInputs(tokenizer.backend_tokenizer, self.encoder)
        self.limit = PromptLimit(
            max_model_len - 1,
            f"at most {max_model_len - 1} tokens long (max_model_len={max_model_len}, one is left for the output)",
        )
        self._pooling_limit = PromptLimit(
            max_model_len, f"at most {max_model_len} tokens long (max_model_len={max_model_len})"
        )
        self._hf_config = hf_config
        self._vocab_size = vocab_size(hf_config)
        self.pooling = PoolingInputs(
            config, hf_config, tokenizer.backend_tokenizer, max_model_len, supported_tasks
        )
        self._defaults = GenerationDefaults(directory, config.model.generation_config)
        # A tokenizer may have tokens for which the model has no logits.
        stated = eos_token_ids(directory, hf_config, config.model.hf_overrides)
        known_eos = [token for token in stated if token < self._vocab_size]
        primary = tokenizer.eos_token_id
        if primary is not None and primary >= self._vocab_size:
            primary = None
        self._eos_token_id = known_eos[0] if primary is None and known_eos else primary
        self._other_eos_ids = [token for token in known_eos if token != self._eos_token_id]

    def default_sampling_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's generation config recommends; none if the engine has
        `generation_config="none"`.

        Raises:
            ModelLoadError: the file has a value that is not possible.
        """
        return self._defaults.sampling_params()

    def process_inputs(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> EngineCoreRequest:
        """Make the request for the engine core; `params` are cloned and completed, never changed.

        Raises:
            InvalidArgumentError: the prompt, a parameter or their combination is not possible with this
                model.
            NotSupportedError: this version does not offer an option yet.
        """
        request_id = _checked_id(request_id)
        sampling = pooling = reasoning = None
        if isinstance(params, PoolingParams):
            pooling = self.pooling.completed(params)
            content = self._pooled_content(prompt, pooling)
        else:
            self.pooling.check_task("generate")
            self._check_room_for_output()
            params = _checked_params(params)
            truncate = params.truncate_prompt_tokens
            content = self._fitted(
                self._content_of(prompt, self.limit if truncate is None else None), truncate
            )
            sampling = self._completed(params, len(content))
            fields = prompt if isinstance(prompt, Mapping) else {}
            reasoning = self._reasoning.tokens_for(
                fields.get("reasoning"), sampling, is_known="reasoning" in fields
            )
        token_ids, embeds = (content, None) if isinstance(content, list) else (None, content)
        if embeds is not None and sampling is not None and sampling.prompt_logprobs is not None:
            raise InvalidArgumentError(
                "prompt_logprobs", sampling.prompt_logprobs, "None with prompt_embeds, which have no tokens"
            )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=sampling,
            pooling_params=pooling,
            prompt_embeds=embeds,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            cache_salt=_cache_salt(prompt),
            priority=self._checked_priority(priority),
            data_parallel_rank=data_parallel_rank,
            reasoning=reasoning,
            output_interval=0.0 if sampling is None else default_interval(sampling),
        )

    def continue_answer(self, request: EngineCoreRequest, written: Sequence[int]) -> Continuation:
        """Let a request that `process_inputs` has made go on behind these tokens of its answer.

        Raises:
            InvalidArgumentError: a token is unknown, or this answer cannot go on from its middle.
        """
        return continued(request, self._checked_tokens(written, "written"))

    @staticmethod
    def assign_request_id(request: EngineCoreRequest) -> None:
        """Keep the caller's id as `external_req_id` and make `request_id` unique."""
        request.external_req_id = request.request_id
        request.request_id = f"{request.request_id}-{secrets.token_hex(4)}"

    def _content_of(self, prompt: PromptType, limit: PromptLimit | None) -> list[int] | PromptEmbeds:
        """Return the tokens or embeddings of a prompt, refused at once where it can be seen to exceed
        `limit`."""
        if isinstance(prompt, str):
            return self._tokenize(prompt, limit)
        if is_ordered(prompt):
            return self._prompt_tokens(prompt, limit)
        if not isinstance(prompt, Mapping):
            raise InvalidTypeError("prompt", prompt, _ALLOWED_PROMPT)
        fields: Mapping[str, Any] = prompt
        unknown = [key for key in fields if key not in _PROMPT_KEYS]
        if unknown:
            raise InvalidArgumentError("prompt", unknown, f"without other keys than {sorted(_PROMPT_KEYS)}")
        if "prompt_embeds" in fields:
            if "prompt_token_ids" in fields:
                raise InvalidArgumentError("prompt", list(fields), "either prompt_token_ids or prompt_embeds")
            return checked_embeds(fields["prompt_embeds"], positive(self._hf_config, "hidden_size"))
        if "prompt_token_ids" in fields:
            return self._prompt_tokens(fields["prompt_token_ids"], limit)
        if not isinstance(fields.get("prompt"), str):
            raise InvalidTypeError("prompt", dict(fields), _ALLOWED_PROMPT)
        return self._tokenize(fields["prompt"], limit)

    def _pooled_content(self, prompt: PromptType, params: PoolingParams) -> list[int] | PromptEmbeds:
        truncated = self.pooling.truncated(prompt, params)
        content = self._content_of(truncated, self._pooling_limit)
        if not isinstance(content, list):
            content = self.pooling.fitted_embeds(content, params)
        self._pooling_limit.check(len(content))
        return content

    def _check_room_for_output(self) -> None:
        if not self.limit.most:
            allowed = "at least 2 for text to be generated, one token of prompt and one of output; a prompt of one token can be embedded"
            raise InvalidArgumentError("max_model_len", self.max_model_len, allowed)

    def _fitted(self, content: list[int] | PromptEmbeds, truncate: int | None) -> list[int] | PromptEmbeds:
        """Return the last tokens of a prompt, as many as `truncate_prompt_tokens` says."""
        limit = self.limit.most
        if truncate is not None:
            if truncate > limit:
                raise InvalidArgumentError(
                    "truncate_prompt_tokens", truncate, f"-1 or in [1, {limit}] (max_model_len - 1), or None"
                )
            content = content[-(limit if truncate == -1 else truncate) :]
        self.limit.check(len(content))
        return content

    def _prompt_tokens(self, token_ids: Any, limit: PromptLimit | None) -> list[int]:
        if limit is not None and isinstance(token_ids, Sized):
            limit.check(len(token_ids))
        return self._checked_tokens(token_ids)

    def _tokenize(self, text: str, limit: PromptLimit | None) -> list[int]:
        token_ids = self.encoder.encode(text, limit)
        if not token_ids:
            raise InvalidArgumentError("prompt", text, "at least one token long")
        self._check_known("prompt", text, token_ids)
        return token_ids

    def _checked_tokens(self, token_ids: object, name: str = "prompt_token_ids") -> list[int]:
        checked = checked_token_ids(name, token_ids)
        if not checked:
            raise InvalidArgumentError(name, checked, "at least one token id")
        self._check_vocabulary(name, checked)
        return checked

    def _check_vocabulary(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            stray = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise InvalidArgumentError(name, stray, f"token ids in [0, {self._vocab_size})")

    def _check_known(self, name: str, text: str, token_ids: list[int]) -> None:
        """Check the tokens of a text: a tokenizer may have more of them than the model."""
        largest = max(token_ids, default=0)
        if largest >= self._vocab_size:
            token = self._id_to_token(largest)
            raise InvalidArgumentError(
                name,
                text,
                f"text whose tokens the model has ({quoted(token)} is token {largest}, the model has "
                f"{self._vocab_size})",
            )

    def _completed(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_vocabulary("logit_bias", params.logit_bias or ())
        params = params.clone()
        params.bad_words_token_ids = self._bad_words_token_ids(params.bad_words) or None
        room = self.max_model_len - prompt_length
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        params.eos_token_id = self._eos_token_id
        if not params.ignore_eos:
            known = set(params.stop_token_ids)
            params.stop_token_ids += [token for token in self._other_eos_ids if token not in known]
        return params

    def _bad_words_token_ids(self, words: list[str]) -> list[list[int]]:
        """Return the tokens of each word at the beginning of a text, and those after a space where they
        differ."""
        found: list[list[int]] = []
        for word in words:
            bare, after_space = (
                self.encoder.encode(prefix + word.lstrip(), add_special_tokens=False, name="bad_words")
                for prefix in ("", " ")
            )
            self._check_known("bad_words", word, [*bare, *after_space])
            found.append(bare)
            # Tokens that only put a space before the others are banned with them.
            if after_space[-len(bare) :] != bare:
                found.append(after_space)
        return found

    def _checked_priority(self, priority: int) -> int:
        priority = require_int("priority", priority)
        require("priority", priority, abs(priority) < 2**63, "an integer of at most 64 bits")
        if priority and self._policy != "priority":
            raise InvalidArgumentError(
                "priority", priority, "0 unless the engine has scheduling_policy='priority'"
            )
        return priority


def prompt_text(prompt: PromptType) -> str | None:
    """Return the text of a prompt, None where only its tokens or its embeddings are known."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def prompt_list(prompts: PromptType | Sequence[PromptType], name: str = "prompts") -> list[PromptType]:
    """Make a list of one prompt or several, as the argument `name` has them."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not is_ordered(prompts):
        raise InvalidTypeError(name, prompts, "a prompt or a list of prompts")
    listed: list[Any] = list(prompts)
    # Integers are the tokens of one prompt: an integer by itself is not a prompt.
    if listed and isinstance(plain(listed[0]), int):
        return [listed]
    return listed


def _checked_id(request_id: object) -> str:
    request_id = plain(request_id)
    if not isinstance(request_id, str):
        raise InvalidTypeError("request_id", request_id, "a string")
    if not request_id:
        raise InvalidArgumentError("request_id", request_id, "not empty")
    require_utf8("request_id", request_id)
    return request_id


def _cache_salt(prompt: PromptType) -> str | None:
    salt = plain(prompt.get("cache_salt")) if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidArgumentError("cache_salt", salt, "a string that is not empty")
    if salt is not None:
        require_utf8("cache_salt", salt)
    return salt


def _checked_params(params: object) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise InvalidTypeError("sampling_params", params, "SamplingParams")
    if params.structured_outputs is not None and not _can_structure():
        raise NotSupportedError("structured_outputs needs llguidance: pip install nbengine[structured]")
    if params.structured_outputs is not None and params.structured_outputs.json is not None:
        warn_of_unenforced("structured_outputs.json", params.structured_outputs.json)
    return params


@functools.cache
def _can_structure() -> bool:
    return importlib.util.find_spec("llguidance") is not None
