"""A worker that is stopped: it is named soon, all goes on when it does, and if it does not the engine ends with its name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator

import pytest
from process_support.engine_under_test import wait_for
from stopping import stop

from nbengine import AsyncLLM, EngineStalledError, RequestOutput, SamplingParams
from nbengine.client.engines.processes import session_processes
from nbengine.config.progress import ProgressDeadlines
from nbengine.errors import EngineDeadError
from nbengine.sampling_params import RequestOutputKind

STEP_TIMEOUT = 8.0
REPORTED = ProgressDeadlines.of_step_timeout(STEP_TIMEOUT).to_report("step")
SLACK = 30.0
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


async def read_to_the_end(stream: AsyncGenerator[RequestOutput, None]) -> None:
    async for _ in stream:
        pass


@pytest.mark.timeout(180)
async def test_of_two_workers_the_stopped_one_is_named_whether_idle_or_in_a_step_and_ends_the_engine_if_it_stays(
    no_leftovers: None,
) -> None:
    engine = AsyncLLM(
        "random-tiny",
        dtype="float32",
        max_model_len=1024,
        num_gpu_blocks_override=128,
        tensor_parallel_size=2,
        step_timeout=STEP_TIMEOUT,
    )
    try:
        await engine.check_health()
        worker = engine.ready.workers[1].pid
        with contextlib.ExitStack() as stack:
            # Idle.
            stack.callback(os.kill, worker, signal.SIGCONT)
            stop(worker)
            wait_for(lambda: engine.stall, "a word", REPORTED + SLACK)
            assert engine.stall.endswith("s, waiting for work; worker 1 is stopped (SIGSTOP?)")
            with pytest.raises(EngineStalledError, match=r"worker 1 is stopped"):
                await engine.check_health(0.5)
        wait_for(lambda: engine.stall is None, "the recovery", SLACK)
        await engine.check_health()
        # In a step.
        stream = engine.generate("hello", ENDLESS)
        await anext(stream)
        stop(worker)
        stopped_at = time.monotonic()
        with pytest.raises(EngineDeadError) as caught:
            await asyncio.wait_for(read_to_the_end(stream), STEP_TIMEOUT + 2 * SLACK)
        assert time.monotonic() - stopped_at >= STEP_TIMEOUT / 2
        assert f"engine core 0 made no progress for {STEP_TIMEOUT:.0f} s, in step " in caught.value.cause
        assert "worker 1 is stopped (SIGSTOP?)" in caught.value.cause
        # The other one is where it waits for it.
        assert "worker 0 is in (innermost call first):" in caught.value.log_tail
        assert "shm_exchange.py" in caught.value.log_tail
        assert "worker 1 is in" not in caught.value.log_tail
        wait_for(lambda: not session_processes(engine.connection), "the end of all processes")
    finally:
        engine.shutdown()
