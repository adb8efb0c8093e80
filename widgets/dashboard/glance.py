"""A look at an engine's state without a widget."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed import EngineFeed, Subscribe
from nbengine.widgets.following.ownership import Owner
from nbengine.widgets.pictures.html import static_bundle


class Glance:
    """A context manager that follows an engine; `bundle()` has its state by MIME type."""

    follows = True

    def __init__(
        self, info: ConnectionInfo, owner: Owner | None = None, subscribe: Subscribe | None = None
    ) -> None:
        self._arguments = (info, self, owner, subscribe)
        self.has_ended = False

    def __enter__(self) -> Self:
        self._feed = EngineFeed.listen(*self._arguments)
        self._feed.wait_until_known()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._feed.leave(self):
            self._feed.join()

    def bundle(self) -> dict[str, str]:
        """Render the present state, by MIME type."""
        with self._feed.state() as state:
            return static_bundle(state)

    def on_state(self, state: DashboardState) -> None:
        """Note whether the engine has ended."""
        self.has_ended = state.state == "ended"
