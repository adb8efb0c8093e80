"""`GET /health`, `/ready` and `/version`, which are answered in every state and need no key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.server.protocol.errors import ApiError
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import service_of
from nbengine.server.service import State
from nbengine.version import __version__


async def health(request: Request) -> Response:
    """Say that this process lives: 200, whatever the engine does."""
    return json_reply({"status": "ok", "state": service_of(request).state})


async def ready(request: Request) -> Response:
    """Say whether a request would be answered now: 200 or 503."""
    service = service_of(request)
    state = service.state
    if state is State.READY:
        return json_reply({"status": "ready"})
    try:
        service.check_ready()
    except ApiError as error:
        return json_reply({"status": state, **error.body()}, error.status, error.headers())
    # It has become ready just now.
    return json_reply({"status": "ready"})


async def version(request: Request) -> Response:
    """Return the version of the server."""
    del request
    return json_reply({"version": __version__})


ROUTES = [Route("/health", health), Route("/ready", ready), Route("/version", version)]
