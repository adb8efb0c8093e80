"""The ASGI application of a server."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from nbengine.errors import NBEngineError
from nbengine.server.middleware import Gate
from nbengine.server.protocol.errors import INVALID_REQUEST, ApiError, api_error_of
from nbengine.server.replies import error_reply
from nbengine.server.response_store import ResponseStore
from nbengine.server.routes import ROUTES
from nbengine.server.service import EngineService

logger = logging.getLogger(__name__)


def make_app(service: EngineService) -> ASGIApp:
    """Make the application: the routes, behind the gate."""
    app = Starlette(
        routes=ROUTES,
        exception_handlers={
            NBEngineError: _on_error,
            RecursionError: _on_error,
            HTTPException: _on_http_exception,
            Exception: _on_failure,
        },
    )
    app.state.service = service
    app.state.responses = ResponseStore()
    return Gate(app, service, service.settings)


async def _on_error(request: Request, error: Exception) -> Response:
    api_error = api_error_of(error)
    if api_error.status >= 500:
        logger.warning("%s: %s", request.url.path, api_error)
    return error_reply(api_error, request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    message = f"there is no {request.method} {path[:200]} here"
    code = "unknown_url" if status == 404 else "method_not_allowed"
    return error_reply(ApiError(status, INVALID_REQUEST, code, None, message), path)


async def _on_failure(request: Request, error: Exception) -> Response:
    # Starlette raises it again, so that it is logged with its traceback.
    return error_reply(api_error_of(error), request.url.path)
