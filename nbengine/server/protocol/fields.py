"""The fields that `/v1/chat/completions` and `/v1/completions` have in common.

None means the same as to leave a field out: clients send null for what they do not set.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream. `include_obfuscation` is accepted: streams have no padding here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    """The schema of a `response_format`; it is enforced, whatever `strict` says."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Constraint(msgspec.Struct, kw_only=True):
    """A constraint of this engine's own, with the fields of `StructuredOutputsParams`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields that both routes take.

    The last part are fields that OpenAI's API does not have; they mean what those of `SamplingParams` mean.
    """

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    response_format: ResponseFormat | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None

    # Accepted, and without a meaning here.
    metadata: Any = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    thinking_budget: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Constraint | None = None
    priority: int | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Tell whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_progress(self) -> bool:
        """Tell whether a stream says how much of its prompt has been read."""
        return bool(self.stream and self.return_progress)

    @property
    def wants_running_usage(self) -> bool:
        """Tell whether each chunk of a stream has the usage so far."""
        return self.wants_usage_chunk and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )
