"""The parts that translations of conversations share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nbengine.errors import NBEngineError
from nbengine.server.protocol.errors import ApiError, api_error_of, bad_request

ChatMessage = dict[str, Any]
"""A message as Chat Completions has it."""


def with_one_beginning(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join the system messages at the beginning: many templates take one, and only there."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    if count < 2:
        return list(messages)
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def not_offered(param: str, message: str) -> ApiError:
    """Make the error about something that an API has and this server has not."""
    return bad_request(message, param, "unsupported_value")


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error about a body of Chat Completions as one about the body that it was made from."""
    if error.param is None or error.param not in names:
        return error
    own = names[error.param]
    message = error.message.replace(error.param, own, 1)
    return ApiError(error.status, error.type, error.code, own, message)


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Turn errors into those of an API that has other names for the fields of Chat Completions."""
    try:
        yield
    except NBEngineError as error:
        raise renamed(api_error_of(error), names) from error
