"""A client without a descriptor for the statistics balances without them, and follows them as soon as it can."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbengine.client.routing import core_link
from nbengine.client.routing.core_link import CoreLink
from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.runtime.connection import ConnectionInfo
from nbengine.sampling_params import SamplingParams


class Owner:
    """Keeps what is watched, and drops the rest."""

    def __init__(self) -> None:
        self.watched: list[Any] = []

    def watch(self, socket: Any, handle: Any) -> None:
        self.watched.append(socket)

    def unwatch(self, socket: Any) -> None:
        self.watched.remove(socket)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_statistics_that_cannot_be_followed_now_are_followed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[OSError] = [OSError(errno.EMFILE, "short") for _ in range(2)]
    feed = SimpleNamespace(socket="feed", close=lambda: None, newest=SimpleNamespace(current_wave=0))

    def open_feed(*_: Any) -> Any:
        if errors:
            raise NBEngineError("no feed") from errors.pop()
        return feed

    clock = SimpleNamespace(monotonic=lambda: now[0])
    now = [100.0]
    monkeypatch.setattr(core_link, "StatsFeed", open_feed)
    monkeypatch.setattr(core_link, "time", clock)
    config = EngineConfig(model=ModelConfig("m"), parallel=ParallelConfig(data_parallel_size=2))
    info = ConnectionInfo(
        name="e", run_dir=str(tmp_path), log_path="", host_pid=0, host_started=0, config=config
    )
    owner = Owner()
    link = CoreLink(info, owner, owner, owner, None)  # type: ignore[arg-type]
    link.open()
    link.set_ranks([0, 1])
    assert errors
    assert "feed" not in owner.watched
    followed = []
    for number in range(3):
        now[0] += 10.0
        link.add(EngineCoreRequest(str(number), [1], SamplingParams()))
        followed.append("feed" in owner.watched)
    assert followed == [False, True, True]
    link.close()
    assert owner.watched == []
