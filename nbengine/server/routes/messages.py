"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.outputs import PromptProgress, RequestOutput
from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.messages import CountTokensRequest, MessagesRequest
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import service_of, stream_of
from nbengine.server.sse import EventStream, event, take_all, until_disconnect
from nbengine.server.translate.answers import AnswerPart
from nbengine.server.translate.conversation import own_names
from nbengine.server.translate.messages_events import Event, MessageBuilder, new_message_id
from nbengine.server.translate.messages_request import CHAT_NAMES, chat_body, prompt_body
from nbengine.server.turns import ChatTurn, open_turn

_decoder = BodyDecoder(MessagesRequest, "/v1/messages")
_count_decoder = BodyDecoder(CountTokensRequest, "/v1/messages/count_tokens")


async def create_message(request: Request) -> Response | EventStream:
    """Answer a conversation, whole or as a stream."""
    asked = _decoder.decode(await request.body())
    message_id = new_message_id()
    turn = await _open(request, chat_body(asked), message_id)
    answer = _Answer(turn, MessageBuilder(asked, turn.model, message_id))
    if asked.stream:
        return stream_of(request, turn.send, answer, failure=_failure, names=CHAT_NAMES)
    return json_reply(await until_disconnect(request.receive, answer.whole()))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a request would have."""
    asked = _count_decoder.decode(await request.body())
    # A conversation of any length can be counted.
    body = prompt_body(asked) | {"truncate_prompt_tokens": -1}
    turn = await _open(request, body, new_message_id())
    return json_reply({"input_tokens": turn.num_prompt_tokens})


async def _open(request: Request, body: dict[str, Any], message_id: str) -> ChatTurn:
    with own_names(CHAT_NAMES):
        return await open_turn(service_of(request), msgspec.convert(body, ChatCompletionRequest), message_id)


class _Answer:
    """The answer to one request: the events of its stream, or the whole."""

    def __init__(self, turn: ChatTurn, builder: MessageBuilder) -> None:
        self._turn = turn
        self._builder = builder
        self._last: AnswerPart | None = None

    def take(self, position: int, output: RequestOutput | PromptProgress) -> bytes:
        return b"".join(map(_encoded, self._events(position, output)))

    def end(self) -> bytes:
        return b"".join(map(_encoded, self._end_events()))

    async def whole(self) -> dict[str, Any]:
        with own_names(CHAT_NAMES):
            await take_all(self._turn.send, self._events)
        self._end_events()
        return self._builder.message

    def _events(self, position: int, output: RequestOutput | PromptProgress) -> list[Event]:
        events: list[Event] = []
        for part in self._turn.take(position, output):
            if self._last is None:
                events += self._builder.start(self._turn.usage())
            self._last = part
            events += self._builder.add(part.deltas)
        return events

    def _end_events(self) -> list[Event]:
        last = self._last
        reason, stop = (None, None) if last is None else (last.finish_reason, last.stop_reason)
        return self._builder.finish(reason or "stop", stop, self._turn.usage())


def _encoded(made: Event) -> bytes:
    return event(made, made["type"])


def _failure(error: ApiError) -> bytes:
    return event(error.anthropic_body(), "error")


ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
