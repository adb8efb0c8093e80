"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.outputs import PromptProgress, RequestOutput
from nbengine.server.events import DONE, event
from nbengine.server.outputs import Outputs
from nbengine.server.protocol.completions import CompletionRequest
from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import id_of, now, service_of, stream_of
from nbengine.server.service import EngineService
from nbengine.server.sse import EventStream, take_all, until_disconnect
from nbengine.server.translate.answers import AnswerReader
from nbengine.server.translate.completions import (
    Completion,
    CompletionForm,
    check_available,
    completion_params,
    prompts_of,
    with_tokens,
)
from nbengine.server.translate.conversation import own_names
from nbengine.server.translate.names import field_names
from nbengine.server.translate.sampling import copies_of

_decoder = BodyDecoder(CompletionRequest, "/v1/completions")


async def completions(request: Request) -> Response | EventStream:
    """Continue texts, whole or as a stream."""
    asked = _decoder.decode(await request.body())
    names = field_names(asked, "prompt")
    with own_names(names):
        return await _answered(request, asked, names)


async def _answered(
    request: Request, asked: CompletionRequest, names: Mapping[str, str]
) -> Response | EventStream:
    service = service_of(request)
    model = service.check_model(asked.model)
    check_available(asked)
    params = completion_params(asked, service.engine.default_sampling_params())
    copies = copies_of(asked, params)
    prompts = prompts_of(asked)
    if asked.add_special_tokens is False:
        encode = partial(service.engine.input_processor.encoder.encode, add_special_tokens=False)
        prompts = await asyncio.to_thread(with_tokens, prompts, encode)
    request_id = f"cmpl-{id_of(request)}"
    send_request = partial(
        service.send,
        prompts,
        params,
        request_id,
        copies=copies,
        priority=asked.priority or 0,
        data_parallel_rank=asked.data_parallel_rank,
        reports_prompts=asked.wants_progress,
    )
    reader = AnswerReader(
        completions_per_prompt=params.n * copies,
        copies=copies,
        has_prompt_logprobs=params.prompt_logprobs is not None,
    )
    form = CompletionForm(
        request_id,
        now(),
        model,
        logprobs=asked.logprobs,
        echo=bool(asked.echo),
        prompt_only=bool(asked.echo) and asked.max_tokens == 0,
        usage_chunk=asked.wants_usage_chunk,
        token_ids=bool(asked.return_token_ids),
        prompt_logprobs=asked.prompt_logprobs is not None,
        per_prompt=params.n * copies,
    )
    answer = Completion(form, reader.first_outputs, _decode_with(service))
    if asked.stream:
        events = _Events(reader, answer, running_usage=asked.wants_running_usage)
        return stream_of(request, send_request, events, names=names)
    return json_reply(await until_disconnect(request.receive, _whole(send_request, reader, answer)))


class _Events:
    """The events of a stream."""

    def __init__(self, reader: AnswerReader, answer: Completion, *, running_usage: bool) -> None:
        self._reader = reader
        self._answer = answer
        self._running_usage = running_usage

    def take(self, position: int, output: RequestOutput | PromptProgress) -> bytes:
        chunks: list[bytes] = []
        for part in self._reader.take(position, output):
            chunk = self._answer.chunk(part, self._reader.usage() if self._running_usage else None)
            if chunk is not None:
                chunks.append(event(chunk))
        return b"".join(chunks)

    def end(self) -> bytes:
        last = self._answer.end(self._reader.usage())
        return DONE if last is None else event(last) + DONE


async def _whole(
    send_request: Callable[[], Awaitable[Outputs]], reader: AnswerReader, answer: Completion
) -> dict[str, Any]:
    def take(position: int, output: RequestOutput | PromptProgress) -> None:
        for part in reader.take(position, output):
            answer.add(part)

    await take_all(send_request, take)
    return answer.response(reader.usage())


def _decode_with(service: EngineService) -> Any:
    def decode(token_ids: list[int]) -> str:
        return str(service.tokenizer.decode(token_ids))

    return decode


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
