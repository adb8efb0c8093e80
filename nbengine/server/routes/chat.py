"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.outputs import PromptProgress, RequestOutput
from nbengine.server.events import DONE
from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import id_of, now, service_of, stream_of
from nbengine.server.sse import EventStream, take_all, until_disconnect
from nbengine.server.translate.chat_events import ChatChunks, ChatCompletion, ChatForm
from nbengine.server.translate.chat_request import echoed_text
from nbengine.server.translate.conversation import own_names
from nbengine.server.turns import ChatTurn, open_turn

_decoder = BodyDecoder(ChatCompletionRequest, "/v1/chat/completions")


async def chat_completions(request: Request) -> Response | EventStream:
    """Answer a conversation, whole or as a stream."""
    asked = _decoder.decode(await request.body())
    request_id = f"chatcmpl-{id_of(request)}"
    turn = await open_turn(service_of(request), asked, request_id)
    form = ChatForm(
        request_id,
        now(),
        turn.model,
        top_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        usage_chunk=asked.wants_usage_chunk,
        running_usage=asked.wants_running_usage,
        token_ids=bool(asked.return_token_ids),
        reasoning=asked.include_reasoning is not False,
        echo=echoed_text(asked),
    )
    if asked.stream:
        return stream_of(request, turn.send, _Events(turn, form), names=turn.names)
    body = await until_disconnect(request.receive, _whole(turn, form))
    return json_reply(body)


class _Events:
    """The events of a stream."""

    def __init__(self, turn: ChatTurn, form: ChatForm) -> None:
        self._turn = turn
        self._chunks = ChatChunks(form)
        self._running_usage = form.running_usage

    def take(self, position: int, output: RequestOutput | PromptProgress) -> bytes:
        chunks: list[bytes] = []
        for part in self._turn.take(position, output):
            chunks += self._chunks.add(part, self._turn.usage() if self._running_usage else None)
        return b"".join(chunks)

    def end(self) -> bytes:
        return b"".join([*self._chunks.end(self._turn.usage()), DONE])


async def _whole(turn: ChatTurn, form: ChatForm) -> dict[str, Any]:
    completion = ChatCompletion(form)

    def take(position: int, output: RequestOutput | PromptProgress) -> None:
        for part in turn.take(position, output):
            completion.add(part)

    with own_names(turn.names):
        await take_all(turn.send, take)
    return completion.response(turn.usage())


ROUTES = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
