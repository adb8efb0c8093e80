"""`POST /v1/embeddings`, `/score`, `/rerank` and `/classify`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.requests.scoring import ScorePlan, plan_scores
from nbengine.pooling_outputs import ScoringRequestOutput
from nbengine.sampling_params import PoolingParams
from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.protocol.errors import bad_request
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
    num_tokens_of,
    places_of,
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
    model = _model_for("embed", service, asked.model)
    prompts = input_prompts(asked.input)
    places = places_of("input", asked.input, prompts)
    params = [embedding_params(asked)] * len(prompts)
    request_id = f"embd-{id_of(request)}"

    async def answer() -> Body:
        outputs = await service.pool(prompts, params, request_id, places, priority=asked.priority or 0)
        # Thousands of vectors take a while to write.
        return await asyncio.to_thread(embedding_body, asked, model, outputs)

    return await _reply(request, answer())


async def score(request: Request) -> Response:
    """Say how well texts fit together."""
    asked = _score.decode(await request.body())
    service = service_of(request)
    model = _model_for("score", service, asked.model)
    first, second = score_texts(asked)
    texts = _Texts(first, second, ("text_1", "text_2"))
    params = head_params(asked)
    body_id = f"score-{id_of(request)}"

    async def answer() -> Body:
        scores, num_tokens = await _scores(service, texts, params, body_id, asked.priority or 0)
        return score_body(body_id, now(), model, scores, num_tokens)

    return await _reply(request, answer())


async def rerank(request: Request) -> Response:
    """Bring documents into the order in which they fit a query."""
    asked = _rerank.decode(await request.body())
    service = service_of(request)
    model = _model_for("score", service, asked.model)
    documents = rerank_texts(asked)
    texts = _Texts(asked.query, documents, ("query", "documents"))
    params = head_params(asked)
    body_id = f"rerank-{id_of(request)}"

    async def answer() -> Body:
        scores, num_tokens = await _scores(service, texts, params, body_id, asked.priority or 0)
        return rerank_body(body_id, model, asked, documents, scores, num_tokens)

    return await _reply(request, answer())


async def classify(request: Request) -> Response:
    """Give each input the likeliest of the model's labels."""
    asked = _classify.decode(await request.body())
    service = service_of(request)
    model = _model_for("classify", service, asked.model)
    prompts = input_prompts(asked.input)
    places = places_of("input", asked.input, prompts)
    params = head_params(asked)
    params.task = "classify"
    body_id = f"classify-{id_of(request)}"

    async def answer() -> Body:
        all_params = [params] * len(prompts)
        outputs = await service.pool(prompts, all_params, body_id, places, priority=asked.priority or 0)
        labels = service.engine.input_processor.pooling.labels
        return classify_body(body_id, now(), model, labels, outputs)

    return await _reply(request, answer())


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts to be compared, and the names of their fields."""

    first: str | list[str]
    second: str | list[str]
    names: tuple[str, str]

    def places(self, plan: ScorePlan) -> list[str]:
        """Return the place in the body of each prompt; a pair is called after its second text."""
        first, second = (
            places_of(name, given, [given] if isinstance(given, str) else given)
            for name, given in zip(self.names, (self.first, self.second), strict=True)
        )
        return second if plan.num_first is None else [*first, *second]


async def _scores(
    service: EngineService, texts: _Texts, params: PoolingParams, request_id: str, priority: int
) -> tuple[list[ScoringRequestOutput], int]:
    """Return the scores and the number of tokens that were read for them."""
    inputs = service.engine.input_processor.pooling
    # It tokenizes pairs of texts.
    plan = await asyncio.to_thread(plan_scores, inputs, texts.first, texts.second, params)
    places = texts.places(plan)
    outputs = await service.pool(plan.prompts, plan.params, request_id, places, priority=priority)
    return plan.scores(outputs), num_tokens_of(outputs)


def _model_for(task: str, service: EngineService, name: str | None) -> str:
    """Return the name of the model that an answer carries.

    Raises:
        ApiError: no model has this name here (404), or it does other tasks (400).
    """
    model = service.check_model(name)
    try:
        service.engine.input_processor.pooling.check_task(task)
    except InvalidArgumentError as error:
        message = f"the model {model} is not for {task!r}: {error}"
        raise bad_request(message, "model", "unsupported_value") from None
    return model


async def _reply(request: Request, answer: Coroutine[Any, Any, Body]) -> Response:
    return json_reply(await until_disconnect(request.receive, answer))


ROUTES = [
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    *[Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")],
    *[Route(path, rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")],
    *[Route(path, classify, methods=["POST"]) for path in ("/classify", "/v1/classify")],
]
