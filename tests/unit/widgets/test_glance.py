"""A look at an engine, alone and beside others who look."""

from __future__ import annotations

import threading

from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.dashboard.glance import Glance
from nbengine.widgets.following.feed import EngineFeed
from tests.unit.widgets.publishing import DEADLINE, Follow, Listener, Publisher


def test_a_glance_leaves_no_thread(info: ConnectionInfo, publisher: Publisher) -> None:
    with Glance(info) as glance:
        feed = EngineFeed._feeds[info.run_dir]
        assert set(glance.bundle()) == {"text/html", "text/plain"}
    assert not feed.is_running


def test_a_glance_does_not_wait_for_the_others_who_look(follow: Follow, info: ConnectionInfo) -> None:
    feed = follow(Listener())

    def look() -> None:
        with Glance(info) as glance:
            glance.bundle()

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(DEADLINE / 4)
    assert not looking.is_alive()
    assert feed.is_running
