"""`GET /v1/models`, and one of them by name."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.server.replies import json_reply
from nbengine.server.routes.common import service_of
from nbengine.server.service import EngineService


async def models(request: Request) -> Response:
    """List the names of the model."""
    service = service_of(request)
    service.check_ready()
    return json_reply({"object": "list", "data": [_model(service, name) for name in service.model_names]})


async def one_model(request: Request) -> Response:
    """Describe the model under one of its names."""
    service = service_of(request)
    return json_reply(_model(service, service.check_model(request.path_params["name"])))


def _model(service: EngineService, name: str) -> dict[str, Any]:
    engine = service.engine
    return {
        "id": name,
        "object": "model",
        "created": int(engine.connection.created),
        "owned_by": "nbengine",
        "root": engine.config.model.model,
        "parent": None,
        "max_model_len": service.max_model_len,
    }


ROUTES = [Route("/v1/models", models), Route("/v1/models/{name:path}", one_model)]
