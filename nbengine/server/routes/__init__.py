"""The handlers of the routes, one file an API."""

from starlette.routing import BaseRoute

from nbengine.server.routes import (
    chat,
    completions,
    health,
    messages,
    metrics,
    models,
    pooling,
    responses,
    tokens,
)

ROUTES: list[BaseRoute] = [
    *health.ROUTES,
    *models.ROUTES,
    *chat.ROUTES,
    *completions.ROUTES,
    *responses.ROUTES,
    *messages.ROUTES,
    *pooling.ROUTES,
    *tokens.ROUTES,
    *metrics.ROUTES,
]
"""All routes of a server."""
