"""The admission of requests."""

from __future__ import annotations

import asyncio

import pytest

from nbengine.server.limits import Limits
from nbengine.server.protocol.errors import ApiError


async def test_places_are_given_in_order_and_never_more_than_there_are() -> None:
    limits = Limits(3, 10)
    first = await limits.enter(2)
    order: list[str] = []

    async def wait_for(name: str, places: int) -> None:
        ticket = await limits.enter(places)
        order.append(name)
        assert limits.num_running <= 3
        ticket.release()

    # The second would fit, and does not overtake.
    tasks = [asyncio.create_task(wait_for("three", 3)), asyncio.create_task(wait_for("one", 1))]
    await asyncio.sleep(0)
    assert (limits.num_running, limits.num_waiting) == (2, 2)
    first.release()
    first.release()
    await asyncio.gather(*tasks)
    assert order == ["three", "one"]
    assert (limits.num_running, limits.num_waiting) == (0, 0)


async def test_one_too_many_is_told_when_to_come_again() -> None:
    now = [0.0]
    limits = Limits(1, 0, clock=lambda: now[0])
    ticket = await limits.enter()
    with pytest.raises(ApiError) as refused:
        await limits.enter()
    assert refused.value.status == 429
    assert refused.value.retry_after == 1
    now[0] = 1000.0
    ticket.release()
    assert limits.retry_after() == 60
    await limits.enter()


async def test_one_who_leaves_the_queue_frees_those_behind_him() -> None:
    limits = Limits(2, 10)
    first = await limits.enter(1)
    large = asyncio.create_task(limits.enter(2))
    small = asyncio.create_task(limits.enter(1))
    await asyncio.sleep(0)
    large.cancel()
    ticket = await small
    assert limits.num_running == 2
    first.release()
    ticket.release()
    assert (limits.num_running, limits.num_waiting) == (0, 0)


async def test_one_who_leaves_in_the_moment_of_admission_takes_no_place() -> None:
    limits = Limits(1, 10)
    first = await limits.enter()
    waiting = asyncio.create_task(limits.enter())
    await asyncio.sleep(0)
    first.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert limits.num_running == 0
    await limits.enter()
