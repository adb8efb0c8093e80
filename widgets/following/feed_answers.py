"""The answers that a dashboard gets from its process's clients: texts of tokens, the end of a request."""

from __future__ import annotations

from collections.abc import Sequence

from nbengine.errors import NBEngineError
from nbengine.metrics.history import MetricsHistory
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed import EngineFeed


def decode(feed: EngineFeed, token_ids: Sequence[int]) -> str | None:
    """Decode tokens to text; None if no client of this process has the engine."""
    texts = (owner.decode(token_ids) for owner in feed.owners)
    return next((text for text in texts if text is not None), None)


def history(feed: EngineFeed, last: str) -> MetricsHistory:
    """Return what the engine's host has kept of the last time, "1h" or "1d"; this waits for the host.

    Raises:
        NBEngineError: this process is not attached to the engine, or the host cannot tell.
    """
    for owner in feed.owners:
        found = owner.history(last)
        if found is not None:
            return found
    raise NBEngineError("this notebook is not attached to the engine: `%engine attach` does that")


def go_on(feed: EngineFeed) -> None:
    """Wake the engine, or lift its pause.

    Raises:
        NBEngineError: this process is not attached to the engine, or its client cannot wake it.
    """
    if not any(owner.go_on() for owner in feed.owners):
        raise NBEngineError("this notebook is not attached to the engine: `%engine attach` does that")


def abort(feed: EngineFeed, state: DashboardState, rank: object, number: object) -> None:
    """End a request, given by its number on a rank; if it has several completions, end only that one.

    Raises:
        NBEngineError: the request has ended, or is not this process's; the message says which.
    """
    mirror = state.mirrors.get(rank) if isinstance(rank, int) else None
    view = mirror.requests.get(number) if mirror is not None and isinstance(number, int) else None
    if view is None:
        raise NBEngineError(f"request {number!r} of rank {rank!r} has ended already, or never existed")
    owner = next((owner for owner in feed.owners if owner.owns(view.added)), None)
    if owner is None:
        raise NBEngineError(
            f"request {view.added.request_id} is not this notebook's: only client {view.added.client_index} of the "
            "engine, which has sent it, can end it"
        )
    owner.abort(view.added)
