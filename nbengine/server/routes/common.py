"""The parts of a request and its answer that all handlers need."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

from nbengine.server.outputs import Outputs
from nbengine.server.service import EngineService
from nbengine.server.sse import Events, EventStream


def service_of(request: Request) -> EngineService:
    """Return the service of the application that has the request."""
    service: EngineService = request.app.state.service
    return service


def id_of(request: Request) -> str:
    """Return the id that the gate has given a request."""
    request_id: str = request.state.request_id
    return request_id


def now() -> int:
    """Return the seconds that answers carry as `created`."""
    return int(time.time())


def stream_of(
    request: Request, send_request: Callable[[], Awaitable[Outputs]], events: Events, **options: Any
) -> EventStream:
    """Make the response of events; `options` are those of `EventStream`."""
    interval = service_of(request).settings.ping_interval
    return EventStream(send_request, events, ping_interval=interval, **options)
