"""The responses that `previous_response_id` can go on from."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from nbengine.server.protocol.errors import ApiError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to its end without its instructions."""

    response: dict[str, Any]
    conversation: list[dict[str, Any]]
    num_bytes: int


class ResponseStore:
    """A store in memory of the latest responses; the one that was used least lately goes first."""

    def __init__(self, max_responses: int = 1000, max_bytes: int = 64 * 2**20) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response: dict[str, Any], conversation: list[dict[str, Any]]) -> None:
        """Keep a response, unless it is larger than the whole store may be."""
        size = len(msgspec.json.encode((response, conversation)))
        if size > self._max_bytes:
            return
        self._stored[response["id"]] = StoredResponse(response, conversation, size)
        self._num_bytes += size
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            _, dropped = self._stored.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response.

        Raises:
            ApiError: it is not kept (any more); the error names `param`.
        """
        if response_id not in self._stored:
            raise _unknown(response_id, param)
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def delete(self, response_id: str) -> None:
        """Forget a response.

        Raises:
            ApiError: it is not kept (any more).
        """
        if response_id not in self._stored:
            raise _unknown(response_id, None)
        self._num_bytes -= self._stored.pop(response_id).num_bytes


def _unknown(response_id: str, param: str | None) -> ApiError:
    status, code = (404, None) if param is None else (400, "previous_response_not_found")
    message = f"no response has the id {response_id[:80]!r}: it was not stored, or has been dropped since"
    return ApiError(status, "invalid_request_error", code, param, message)
