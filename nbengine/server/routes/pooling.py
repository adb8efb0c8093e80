"""`POST /v1/embeddings`, `/score`, `/rerank` and `/classify`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.frontend.requests.scoring import plan_scores
from nbengine.pooling_outputs import ScoringRequestOutput
from nbengine.sampling_params import PoolingParams
from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import id_of, now, service_of
from nbengine.server.service import EngineService
from nbengine.server.sse import until_disconnect
from nbengine.server.translate.pooling import (
    Body,
    classify_body,
    embedding_body,
    embedding_params,
    head_params,
    input_prompts,
    rerank_body,
    rerank_texts,
    score_body,
    score_texts,
)

_embeddings = BodyDecoder(EmbeddingRequest, "/v1/embeddings")
_score = BodyDecoder(ScoreRequest, "/score")
_rerank = BodyDecoder(RerankRequest, "/rerank")
_classify = BodyDecoder(ClassifyRequest, "/classify")


async def embeddings(request: Request) -> Response:
    """Make a vector of each input."""
    asked = _embeddings.decode(await request.body())
    service = service_of(request)
    model = service.check_model(asked.model)
    prompts = input_prompts(asked.input)
    params = [embedding_params(asked)] * len(prompts)

    async def answer() -> Body:
        outputs = await service.pool(prompts, params, f"embd-{id_of(request)}", priority=asked.priority or 0)
        # Thousands of vectors take a while to write.
        return await asyncio.to_thread(embedding_body, asked, model, outputs)

    return await _reply(request, answer())


async def score(request: Request) -> Response:
    """Say how well texts fit together."""
    asked = _score.decode(await request.body())
    service = service_of(request)
    model = service.check_model(asked.model)
    first, second = score_texts(asked)
    params = head_params(asked)
    body_id = f"score-{id_of(request)}"

    async def answer() -> Body:
        scores = await _scores(service, first, second, params, body_id, asked.priority or 0)
        return score_body(body_id, now(), model, scores)

    return await _reply(request, answer())


async def rerank(request: Request) -> Response:
    """Bring documents into the order in which they fit a query."""
    asked = _rerank.decode(await request.body())
    service = service_of(request)
    model = service.check_model(asked.model)
    texts = rerank_texts(asked)
    params = head_params(asked)
    body_id = f"rerank-{id_of(request)}"

    async def answer() -> Body:
        scores = await _scores(service, asked.query, texts, params, body_id, asked.priority or 0)
        return rerank_body(body_id, model, asked, texts, scores)

    return await _reply(request, answer())


async def classify(request: Request) -> Response:
    """Give each input the likeliest of the model's labels."""
    asked = _classify.decode(await request.body())
    service = service_of(request)
    model = service.check_model(asked.model)
    prompts = input_prompts(asked.input)
    params = head_params(asked)
    params.task = "classify"
    body_id = f"classify-{id_of(request)}"

    async def answer() -> Body:
        outputs = await service.pool(prompts, [params] * len(prompts), body_id, priority=asked.priority or 0)
        labels = service.engine.input_processor.pooling.labels
        return classify_body(body_id, now(), model, labels, outputs)

    return await _reply(request, answer())


async def _scores(
    service: EngineService,
    first: str | list[str],
    second: str | list[str],
    params: PoolingParams,
    request_id: str,
    priority: int,
) -> list[ScoringRequestOutput]:
    inputs = service.engine.input_processor.pooling
    # It tokenizes pairs of texts.
    plan = await asyncio.to_thread(plan_scores, inputs, first, second, params)
    return plan.scores(await service.pool(plan.prompts, plan.params, request_id, priority=priority))


async def _reply(request: Request, answer: Coroutine[Any, Any, Body]) -> Response:
    return json_reply(await until_disconnect(request.receive, answer))


ROUTES = [
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    *[Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")],
    *[Route(path, rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")],
    *[Route(path, classify, methods=["POST"]) for path in ("/classify", "/v1/classify")],
]
