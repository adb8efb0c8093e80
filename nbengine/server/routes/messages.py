"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.server.events import event
from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.messages import CountTokensRequest, MessagesRequest
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import stream_of
from nbengine.server.routes.typed_events import TypedAnswer, open_as_chat
from nbengine.server.sse import EventStream, until_disconnect
from nbengine.server.translate.answers import AnswerPart
from nbengine.server.translate.messages_events import MessageBuilder, new_message_id
from nbengine.server.translate.messages_request import CHAT_NAMES, chat_body, prompt_body
from nbengine.server.turns import ChatTurn

_decoder = BodyDecoder(MessagesRequest, "/v1/messages")
_count_decoder = BodyDecoder(CountTokensRequest, "/v1/messages/count_tokens")


async def create_message(request: Request) -> Response | EventStream:
    """Answer a conversation, whole or as a stream."""
    asked = _decoder.decode(await request.body())
    message_id = new_message_id()
    turn = await open_as_chat(request, chat_body(asked), message_id, CHAT_NAMES)
    answer = _Answer(turn, MessageBuilder(asked, turn.model, message_id))
    if asked.stream:
        return stream_of(request, turn.send, answer, failure=_failure, names=answer.names)
    return json_reply(await until_disconnect(request.receive, answer.whole()))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a request would have."""
    asked = _count_decoder.decode(await request.body())
    # A conversation of any length can be counted.
    body = prompt_body(asked) | {"truncate_prompt_tokens": -1}
    turn = await open_as_chat(request, body, new_message_id(), CHAT_NAMES)
    return json_reply({"input_tokens": turn.num_prompt_tokens})


class _Answer(TypedAnswer):
    """The answer to one request as a message."""

    def __init__(self, turn: ChatTurn, builder: MessageBuilder) -> None:
        super().__init__(turn, CHAT_NAMES)
        self._builder = builder

    def _start(self) -> bytes:
        return self._builder.start(self._turn.usage())

    def _add(self, part: AnswerPart) -> bytes:
        return self._builder.add(part.deltas)

    def _finish(self, last: AnswerPart | None) -> bytes:
        reason, stop = (None, None) if last is None else (last.finish_reason, last.stop_reason)
        return self._builder.finish(reason or "stop", stop, self._turn.usage())

    def _answer(self) -> dict[str, Any]:
        return self._builder.message


def _failure(error: ApiError) -> bytes:
    return event(error.anthropic_body(), "error")


ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
