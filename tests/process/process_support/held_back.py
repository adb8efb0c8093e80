"""Requests that an engine gets all at once, however slowly they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nbengine import AsyncLLM

DEADLINE = 60.0


@asynccontextmanager
async def held_back(engine: AsyncLLM, count: int) -> AsyncIterator[None]:
    """Hold requests back that the body asks for, in tasks, until `count` of them are there."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    yield

    async def until_all_wait() -> None:
        while sum(core.num_waiting_reqs for core in (await engine.stats()).engines) < count:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(until_all_wait(), DEADLINE)
    await engine.resume_generation()
