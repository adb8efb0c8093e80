"""The check of an engine from end to end: all processes that take part in a step answer in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from nbengine.checks import MAX_TIMEOUT, require, require_number
from nbengine.client.base import EngineCoreClient
from nbengine.errors import EngineStalledError, LeaseExpiredError, UtilityError

DEFAULT_HEALTH_TIMEOUT = 30.0
"""Seconds for a health check, which is answered only after the step in progress, of a long prompt perhaps."""


def check_health(client: EngineCoreClient, timeout: float = DEFAULT_HEALTH_TIMEOUT) -> None:
    """Wait until the engine's host, the busy loop of every engine core and every worker have answered.

    Args:
        timeout: seconds that they may take together. An engine in this process answers when it has
            computed the answer, however long that takes.

    Raises:
        EngineDeadError: the engine has ended.
        EngineStalledError: not all have answered within `timeout` seconds, or a worker has failed.
        InvalidArgumentError: `timeout` is not above 0.
    """
    answers = _ask(client, timeout)
    wait(answers, timeout)
    _judge(client, answers, timeout)


async def check_health_async(client: EngineCoreClient, timeout: float = DEFAULT_HEALTH_TIMEOUT) -> None:
    """Check the engine's health like `check_health`, for coroutines, on any event loop."""
    answers = _ask(client, timeout)
    all_answers = asyncio.gather(*map(asyncio.wrap_future, answers), return_exceptions=True)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(all_answers, timeout)
    _judge(client, answers, timeout)


def _ask(client: EngineCoreClient, timeout: float) -> list[Future[Any]]:
    timeout = require_number("timeout", timeout)
    require(
        "timeout",
        timeout,
        0 < timeout <= MAX_TIMEOUT,
        f"a number of seconds above 0, at most {MAX_TIMEOUT:,}",
    )
    try:
        client.check_alive()
    except LeaseExpiredError as error:
        raise EngineStalledError(str(error)) from error
    return client.ask_health()


def _judge(client: EngineCoreClient, answers: Sequence[Future[Any]], timeout: float) -> None:
    """Raise the errors of `check_health`, when the time is up or all have answered."""
    missing = [answer for answer in answers if answer.cancelled() or not answer.done()]
    for answer in answers:
        if answer in missing:
            continue
        try:
            answer.result()
        except (UtilityError, LeaseExpiredError) as error:
            raise EngineStalledError(str(error)) from error
    if missing:
        raise EngineStalledError(
            f"no answer to a health check within {timeout:g} s: {client.describe_silence(missing)}"
        )
