"""Requests that wait for an engine that sleeps or is paused: the log says so."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from nbengine.client.sync_mp import QUIET_SECONDS

logger = logging.getLogger(__name__)

LEAST_SECONDS_BETWEEN = 10.0
"""Seconds between two questions of requests that wait side by side."""
_WARNINGS = {
    "is_sleeping": "engine %s sleeps, so that requests wait: wake_up() lets them go on",
    "is_paused": "engine %s is paused, so that requests wait: resume_generation() lets them go on",
}
"""Utilities that say whether requests have to wait, and the warnings for those that wait."""


class HeldBack:
    """The question to an engine whether it holds requests back; `submit` sends a utility call to it."""

    def __init__(self, name: str, submit: Callable[[str], Future[Any]]) -> None:
        self._name = name
        self._submit = submit
        self._asked = -math.inf

    def ask(self) -> None:
        """Have the log say, without waiting for that, if requests wait for someone to wake or resume the engine."""
        for method, warning in _WARNINGS.items():
            self._submit(method).add_done_callback(partial(_warn_if, self._name, warning))

    def ask_later(self) -> asyncio.TimerHandle:
        """Ask on the running loop once a request has waited for `QUIET_SECONDS`, unless the timer is cancelled."""
        return asyncio.get_running_loop().call_later(QUIET_SECONDS, self._ask_for_all)

    def _ask_for_all(self) -> None:
        now = time.monotonic()
        if now - self._asked >= LEAST_SECONDS_BETWEEN:
            self._asked = now
            self.ask()


def _warn_if(name: str, warning: str, answer: Future[bool]) -> None:
    # The end of an engine is an error of the call that waits for the requests.
    if not answer.cancelled() and answer.exception() is None and answer.result():
        logger.warning(warning, name)
