"""The fields that this server takes beyond those of an API, under the names of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import msgspec


class EngineFields(msgspec.Struct, kw_only=True):
    """Fields that every API of conversations takes in addition; None means the same as to leave one out."""

    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None


def given_fields(request: EngineFields) -> dict[str, Any]:
    """Return the fields of `EngineFields` that a request has set, by name."""
    values = {name: getattr(request, name) for name in EngineFields.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}
