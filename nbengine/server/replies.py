"""Answers of JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from nbengine.server.protocol.errors import ApiError

ANTHROPIC_PATH = "/v1/messages"

_encoder = msgspec.json.Encoder()


def json_reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a response of anything that msgspec makes JSON of."""
    return Response(_encoder.encode(content), status, headers, "application/json")


def error_reply(error: ApiError, path: str) -> Response:
    """Make the response for an error, in the form of the API that `path` belongs to."""
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    return json_reply(error.anthropic_body() if is_anthropic else error.body(), error.status, error.headers())
