"""Answers of APIs that are a chat in other words, and whose events are named by their types."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from nbengine.outputs import PromptProgress, RequestOutput
from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.routes.common import service_of
from nbengine.server.sse import take_all
from nbengine.server.translate.answers import AnswerPart
from nbengine.server.translate.conversation import own_names
from nbengine.server.translate.names import in_turn
from nbengine.server.turns import ChatTurn, open_turn


async def open_as_chat(
    request: Request, body: dict[str, Any], request_id: str, names: Mapping[str, str]
) -> ChatTurn:
    """Open the turn that is asked for by the body of a chat; errors have the API's `names` of parameters."""
    with own_names(names):
        return await open_turn(service_of(request), msgspec.convert(body, ChatCompletionRequest), request_id)


class TypedAnswer(ABC):
    """The answer to one request: the events of its stream, or the whole. Errors have the API's names."""

    def __init__(self, turn: ChatTurn, names: Mapping[str, str]) -> None:
        self._turn = turn
        self.names = in_turn(turn.names, names)
        """The fields that an error about the request is to name."""
        self._last: AnswerPart | None = None

    def take(self, position: int, output: RequestOutput | PromptProgress) -> bytes:
        """Return the events that an output brings; those at the beginning wait for the engine to take the request."""
        chunks: list[bytes] = []
        for part in self._turn.take(position, output):
            if self._last is None:
                chunks.append(self._start())
            self._last = part
            chunks.append(self._add(part))
        return b"".join(chunks)

    def end(self) -> bytes:
        """Return the events at the end."""
        return self._finish(self._last)

    async def whole(self) -> dict[str, Any]:
        """Return the answer when it is complete."""
        with own_names(self.names):
            await take_all(self._turn.send, self.take)
        self._finish(self._last)
        return self._answer()

    @abstractmethod
    def _start(self) -> bytes:
        """Return the events at the beginning."""

    @abstractmethod
    def _add(self, part: AnswerPart) -> bytes:
        """Return the events of a part."""

    @abstractmethod
    def _finish(self, last: AnswerPart | None) -> bytes:
        """Return the events at the end; `last` is the last part."""

    @abstractmethod
    def _answer(self) -> dict[str, Any]:
        """Return the answer behind its end."""
