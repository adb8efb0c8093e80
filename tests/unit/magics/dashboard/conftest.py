"""Dashboards that are quick, of an engine whose coordinator is played."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.widgets.dashboard import plain as plain_module
from nbengine.widgets.dashboard import widget as dashboard_module
from nbengine.widgets.dashboard.throttle import Throttle
from nbengine.widgets.dashboard.widget import Dashboard
from nbengine.widgets.following import feed as feed_module
from nbengine.widgets.following.feed import EngineFeed
from tests.unit.magics.dashboard.rig import Script, wait_until
from tests.unit.widgets.publishing import DEADLINE, Publisher


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait for what a person would not notice."""
    monkeypatch.setattr(feed_module, "PUBLISH_INTERVAL", 0.02)
    monkeypatch.setattr(feed_module, "IDLE_INTERVAL", 0.02)
    monkeypatch.setattr(feed_module, "ALIVE_INTERVAL", 0.05)
    monkeypatch.setattr(dashboard_module, "FRAME_INTERVAL", 0.0)
    monkeypatch.setattr(dashboard_module, "BYTES_PER_SECOND", 1e9)
    for module in (dashboard_module, plain_module):
        monkeypatch.setattr(module, "LINE", Throttle(0.0, 1e9, 0.0))
    monkeypatch.setattr(Dashboard, "_snapshots", Throttle(0.0, 1e9, 0.0))
    monkeypatch.setattr(dashboard_module, "QUIET", 0.0)
    monkeypatch.setattr(feed_module, "FIRST_STATE_SECONDS", DEADLINE)


@pytest.fixture
def publisher(engine: Any) -> Iterator[Publisher]:
    """The coordinator of the engine that the shell has."""
    publisher = Publisher(engine.connection)
    yield publisher
    EngineFeed.announce_end(engine.connection, "the test is over")
    wait_until(lambda: not any(thread.name.startswith("nbengine-feed") for thread in threading.enumerate()))
    publisher.close()


@pytest.fixture
def shown(
    kernel_shell: InteractiveShell, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> tuple[Dashboard, Script]:
    """A dashboard whose script has been loaded."""
    kernel_shell.run_cell("%dashboard -o board").raise_error()
    dashboard = kernel_shell.user_ns["board"]
    script = Script(dashboard, monkeypatch)
    script.say(kind="hello")
    script.wait_for(lambda decoder: 0 in decoder.ranks)
    return dashboard, script
