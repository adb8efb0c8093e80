"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.messages import CountTokensRequest, MessagesRequest
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import service_of
from nbengine.server.sse import EventStream, event, until_disconnect
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
    builder = MessageBuilder(asked, turn.model, message_id)
    if asked.stream:
        interval = service_of(request).settings.ping_interval
        return EventStream(_encoded(turn, builder), ping_interval=interval, failure=_failure)
    return json_reply(await until_disconnect(request.receive, _whole(turn, builder)))


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


async def _events(turn: ChatTurn, builder: MessageBuilder) -> AsyncGenerator[Event, None]:
    last: AnswerPart | None = None
    with own_names(CHAT_NAMES):
        async with aclosing(turn.outputs()) as outputs:
            async for position, output in outputs:
                for part in turn.take(position, output):
                    if last is None:
                        for made in builder.start(turn.usage()):
                            yield made
                    last = part
                    for made in builder.add(part.deltas):
                        yield made
    reason, stop = (None, None) if last is None else (last.finish_reason, last.stop_reason)
    for made in builder.finish(reason or "stop", stop, turn.usage()):
        yield made


async def _encoded(turn: ChatTurn, builder: MessageBuilder) -> AsyncGenerator[bytes, None]:
    async with aclosing(_events(turn, builder)) as events:
        async for made in events:
            yield event(made, made["type"])


async def _whole(turn: ChatTurn, builder: MessageBuilder) -> dict[str, Any]:
    async with aclosing(_events(turn, builder)) as events:
        async for _ in events:
            pass
    return builder.message


def _failure(error: ApiError) -> bytes:
    return event(error.anthropic_body(), "error")


ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
