"""Stand-ins for the two ends of a dashboard: the engine's coordinator and the browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from nbengine.metrics.trace import RequestAdded, RequestTrace, StepPlanned
from nbengine.widgets.dashboard.widget import Dashboard
from tests.unit.widgets.frame_decoder import FrameDecoder
from tests.unit.widgets.publishing import DEADLINE, Publisher

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\x07"


class Script:
    """The browser's end of a dashboard: it keeps what is sent, and reads the frames."""

    def __init__(self, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dashboard = dashboard
        self.decoder = FrameDecoder()
        self.messages: list[dict[str, Any]] = []
        self.frames = 0
        self._changed = threading.Condition()
        monkeypatch.setattr(dashboard, "send", self._receive)

    def say(self, **content: object) -> None:
        self.dashboard._handle_custom_msg(content, [])

    def ask(self, **content: object) -> dict[str, Any]:
        """Ask a question; return the answer, which comes before anything else can happen."""
        self.say(**content)
        return self.messages[-1]

    def wait_for(self, condition: Callable[[FrameDecoder], bool]) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self.frames > 0 and condition(self.decoder), DEADLINE)
        assert found, self.decoder.frame

    def _receive(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        with self._changed:
            if content["kind"] == "frame":
                self.decoder.take(content, buffers or [])
                self.frames += 1
            else:
                self.messages.append(content)
            self._changed.notify_all()


def begin(publisher: Publisher, name: str = "random-tiny-1", client: int = 1) -> None:
    """Let a request run, with its prompt in two blocks of which one is full."""
    prompt = [72, 105, 33, 32, 72, 111]
    publisher.publish(
        RequestAdded(0, name, client, publisher.time, 6, 40, prompt),
        StepPlanned(0, publisher.time, [0], [6], [0], [0], [(0, [1, 2])]),
        num_running_reqs=1,
        num_free_blocks=6,
    )


def hostile_request() -> RequestTrace:
    return RequestTrace(RequestAdded(0, HOSTILE, 1, 1000.0, 6, 40, [60, 98, 62]), True, 6, 1, 0, 0, [1, 2])


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
