"""`GET /metrics`: the statistics of the engine, for Prometheus; `GET /metrics/history`: those of the last time."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.checks import require
from nbengine.metrics.exposition import EngineCollector, exposition
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import service_of

MOST_DIGITS = 9


async def metrics(request: Request) -> Response:
    """Answer with the newest statistics of all engine cores."""
    service = service_of(request)
    # The regular look may be a fifth of a second old.
    service.look()
    model = service.engine.config.model.model
    accept = request.headers.get("accept", "")
    body, content_type = exposition(EngineCollector(lambda: service.stats, model), accept)
    return Response(body, headers={"content-type": content_type})


async def history(request: Request) -> Response:
    """Answer with the rows that the engine's host has kept, also of times when nobody asked."""
    query = request.query_params
    for name in query:
        require("query", name, name in ("last", "rank"), "made of `last` and `rank`")
    rank = query.get("rank")
    is_number = rank is None or (rank.isdecimal() and rank.isascii() and len(rank) <= MOST_DIGITS)
    require("rank", rank, is_number, "the rank of an engine core")
    found = await service_of(request).engine.metrics(
        query.get("last", "1h"), rank=None if rank is None else int(rank)
    )
    return json_reply({"rows": found.rows()})


ROUTES = [Route("/metrics", metrics), Route("/metrics/history", history)]
