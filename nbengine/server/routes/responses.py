"""`POST /v1/responses`, and the responses that it has stored."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.responses import ResponsesRequest
from nbengine.server.replies import json_reply
from nbengine.server.response_store import ResponseStore
from nbengine.server.routes.common import now, stream_of
from nbengine.server.routes.typed_events import TypedAnswer, open_as_chat
from nbengine.server.sse import EventStream, until_disconnect
from nbengine.server.translate.answers import AnswerPart
from nbengine.server.translate.conversation import ChatMessage
from nbengine.server.translate.logprobs import chat_logprobs
from nbengine.server.translate.responses_events import ResponseBuilder, new_response_id
from nbengine.server.translate.responses_request import (
    CHAT_NAMES,
    chat_body,
    input_messages,
    wants_logprobs,
)
from nbengine.server.translate.segments import Logprobs
from nbengine.server.turns import ChatTurn

_decoder = BodyDecoder(ResponsesRequest, "/v1/responses")


class _Answer(TypedAnswer):
    """The answer to one request, on its way from the engine to the caller and the store."""

    def __init__(
        self,
        asked: ResponsesRequest,
        turn: ChatTurn,
        response_id: str,
        conversation: list[ChatMessage],
        store: ResponseStore,
    ) -> None:
        super().__init__(turn, CHAT_NAMES)
        self._builder = ResponseBuilder(asked, turn.model, response_id, now())
        self._top_logprobs = (asked.top_logprobs or 0) if wants_logprobs(asked) else None
        self._conversation = conversation
        self._store = store if asked.store is not False else None

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails."""
        return self._builder.fail(error)

    def _start(self) -> bytes:
        return self._builder.start()

    def _add(self, part: AnswerPart) -> bytes:
        return self._builder.add(part.deltas, self._logprobs(part))

    def _finish(self, last: AnswerPart | None) -> bytes:
        reason = None if last is None else last.finish_reason
        events = self._builder.finish(reason or "stop", self._turn.usage())
        # A caller who has seen the end may go on from it at once.
        self._keep()
        return events

    def _answer(self) -> dict[str, Any]:
        return self._builder.response

    def _logprobs(self, part: AnswerPart) -> list[Logprobs]:
        top = self._top_logprobs
        return [] if top is None else [chat_logprobs(own, top) for own in part.content_logprobs or ()]

    def _keep(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            response = self._builder.response
            store.put(response, [*self._conversation, *input_messages(response["output"])])


async def create_response(request: Request) -> Response | EventStream:
    """Answer a conversation, whole or as a stream."""
    asked = _decoder.decode(await request.body())
    store = _store_of(request)
    conversation = _conversation(asked, store)
    response_id = new_response_id()
    turn = await open_as_chat(request, chat_body(asked, conversation), response_id, CHAT_NAMES)
    if asked.truncation == "auto":
        turn.leave_room(asked.max_output_tokens)
    answer = _Answer(asked, turn, response_id, conversation, store)
    if asked.stream:
        return stream_of(request, turn.send, answer, failure=answer.failure, names=answer.names)
    return json_reply(await until_disconnect(request.receive, answer.whole()))


async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a request would have."""
    asked = _decoder.decode(await request.body())
    # A conversation of any length can be counted.
    body = chat_body(asked, _conversation(asked, _store_of(request))) | {"truncate_prompt_tokens": -1}
    turn = await open_as_chat(request, body, new_response_id(), CHAT_NAMES)
    return json_reply({"object": "response.input_tokens", "input_tokens": turn.num_prompt_tokens})


async def stored_response(request: Request) -> Response:
    """Return a response that has been stored."""
    return json_reply(_store_of(request).get(request.path_params["response_id"]).response)


async def delete_response(request: Request) -> Response:
    """Forget a response that has been stored."""
    response_id = request.path_params["response_id"]
    _store_of(request).delete(response_id)
    return json_reply({"id": response_id, "object": "response", "deleted": True})


def _conversation(asked: ResponsesRequest, store: ResponseStore) -> list[ChatMessage]:
    earlier: list[ChatMessage] = []
    if asked.previous_response_id is not None:
        earlier = store.get(asked.previous_response_id, "previous_response_id").conversation
    return [*earlier, *input_messages(asked.input, earlier)]


def _store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


ROUTES = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{response_id}", stored_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
]
