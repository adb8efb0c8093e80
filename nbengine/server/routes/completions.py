"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.server.merging import Indexed
from nbengine.server.protocol.completions import CompletionRequest
from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import id_of, now, service_of, stream_of
from nbengine.server.service import EngineService
from nbengine.server.sse import DONE, EventStream, event, until_disconnect
from nbengine.server.translate.answers import AnswerReader
from nbengine.server.translate.completions import (
    Completion,
    CompletionForm,
    check_available,
    completion_params,
    prompts_of,
    with_tokens,
)
from nbengine.server.translate.sampling import copies_of

_decoder = BodyDecoder(CompletionRequest, "/v1/completions")
Outputs = AsyncGenerator[Indexed, None]


async def completions(request: Request) -> Response | EventStream:
    """Continue texts, whole or as a stream."""
    asked = _decoder.decode(await request.body())
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
    outputs = service.generate(
        [prompt for prompt in prompts for _ in range(copies)],
        params,
        request_id,
        priority=asked.priority or 0,
        data_parallel_rank=asked.data_parallel_rank,
        reports_prompts=asked.wants_progress,
    )
    reader = AnswerReader(completions_per_prompt=params.n * copies, copies=copies)
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
        return stream_of(request, _events(outputs, reader, answer, running=asked.wants_running_usage))
    return json_reply(await until_disconnect(request.receive, _whole(outputs, reader, answer)))


async def _events(
    outputs: Outputs, reader: AnswerReader, answer: Completion, *, running: bool
) -> AsyncGenerator[bytes, None]:
    async with aclosing(outputs):
        async for position, output in outputs:
            for part in reader.take(position, output):
                chunk = answer.chunk(part, reader.usage() if running else None)
                if chunk is not None:
                    yield event(chunk)
    last = answer.end(reader.usage())
    if last is not None:
        yield event(last)
    yield DONE


async def _whole(outputs: Outputs, reader: AnswerReader, answer: Completion) -> dict[str, Any]:
    async with aclosing(outputs):
        async for position, output in outputs:
            for part in reader.take(position, output):
                answer.add(part)
    return answer.response(reader.usage())


def _decode_with(service: EngineService) -> Any:
    def decode(token_ids: list[int]) -> str:
        return str(service.tokenizer.decode(token_ids))

    return decode


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
