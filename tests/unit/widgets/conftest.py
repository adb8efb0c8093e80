"""An engine whose coordinator is played, and listeners that follow it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.following import feed as feed_module
from nbengine.widgets.following.feed import EngineFeed, FeedListener
from nbengine.widgets.following.ownership import Owner

pytest.register_assert_rewrite("tests.unit.widgets.frame_reader")

from tests.unit.widgets.publishing import DEADLINE, Follow, Publisher, make_info


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConnectionInfo:
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(feed_module, "PUBLISH_INTERVAL", 0.02)
    monkeypatch.setattr(feed_module, "IDLE_INTERVAL", 0.05)
    monkeypatch.setattr(feed_module, "FIRST_STATE_SECONDS", DEADLINE)
    return make_info(tmp_path / "run")


@pytest.fixture
def publisher(info: ConnectionInfo) -> Iterator[Publisher]:
    publisher = Publisher(info)
    yield publisher
    publisher.close()


@pytest.fixture
def follow(info: ConnectionInfo, publisher: Publisher) -> Iterator[Follow]:
    """Have listeners follow the engine; in the end no thread may be left."""
    joined: list[tuple[EngineFeed, FeedListener]] = []

    def begin(listener: FeedListener, owner: Owner | None = None) -> EngineFeed:
        feed = EngineFeed.listen(info, listener, owner)
        joined.append((feed, listener))
        return feed

    yield begin
    for feed, listener in joined:
        feed.leave(listener)
    for feed, _ in joined:
        feed.join(DEADLINE)
        assert not feed.is_running
    assert info.run_dir not in EngineFeed._feeds
