"""`GET /metrics`: the statistics of the engine, for Prometheus."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.metrics.exposition import EngineCollector, exposition
from nbengine.server.routes.common import service_of


async def metrics(request: Request) -> Response:
    """Answer with the newest statistics of all engine cores."""
    service = service_of(request)
    # The regular look may be a fifth of a second old.
    service.look()
    model = service.engine.config.model.model
    accept = request.headers.get("accept", "")
    body, content_type = exposition(EngineCollector(lambda: service.stats, model), accept)
    return Response(body, headers={"content-type": content_type})


ROUTES = [Route("/metrics", metrics)]
