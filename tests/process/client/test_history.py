"""The history of a real engine that nobody has watched: its rows add up to what was generated."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from process_support.engine_under_test import wait_for

from nbengine import AsyncLLM, SamplingParams
from nbengine.errors import EngineDeadError, InvalidArgumentError
from nbengine.metrics.history import MetricsHistory
from nbengine.runtime.connection import newest

StartAsync = Callable[..., AsyncLLM]


async def run(llm: AsyncLLM, rank: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async for _ in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, data_parallel_rank=rank):
        pass


def counts(history: MetricsHistory, rank: int) -> tuple[float, int, int]:
    """Return the sampled tokens, those of prompts, and the rows with a time to a first token."""
    rows = [row for row in history.rows() if row["rank"] == rank]
    return (
        round(sum(row["tokens_per_second"] * row["seconds"] for row in rows), 6),
        sum(row["prompt_tokens"] for row in rows),
        sum(row["ttft_p50"] is not None for row in rows),
    )


async def test_rows_add_up_to_what_was_generated_rank_by_rank_and_over_a_restart(
    start_async: StartAsync,
) -> None:
    llm = start_async(data_parallel_size=2)
    for rank, max_tokens in ((0, 4), (0, 5), (1, 6)):
        await run(llm, rank, max_tokens)
    # The last report may be under way.
    wait_for(lambda: counts(llm.control.metrics(), 0)[0] == 9, "the tokens of rank 0")
    wait_for(lambda: counts(llm.control.metrics("1d"), 1)[0] == 6, "the tokens of rank 1")
    history = await llm.metrics(last="1h")
    assert history.ranks == [0, 1]
    assert counts(history, 0)[1] == 6
    assert counts(history, 0)[2] in (1, 2)
    assert all(0 <= row["kv_usage"] <= 1 for row in history.rows())
    assert max(row["running"] for row in history.rows()) == 1
    # A client that comes later, and asks for one rank, is told the same.
    other = AsyncLLM.attach(llm.name)
    alone = await other.metrics(3600, rank=1)
    assert (alone.ranks, counts(alone, 1)) == ([1], counts(history, 1))
    other.detach()

    (pid,) = [core.pid for core in newest(llm.connection).ready if core.rank == 1]
    os.kill(pid, signal.SIGKILL)
    wait_for(
        lambda: [c.pid for c in newest(llm.connection).ready if c.rank == 1] not in ([pid], []),
        "its successor",
    )
    await run(llm, 1, 3)
    wait_for(lambda: counts(llm.control.metrics(), 1)[0] == 9, "the tokens of both")
    assert counts(llm.control.metrics(), 0)[0] == 9
    with pytest.raises(InvalidArgumentError, match="last must be a number of seconds"):
        await llm.metrics("1 week")
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        await llm.metrics()
