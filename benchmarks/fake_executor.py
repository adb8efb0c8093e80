"""Executors without a model, which stand in where a benchmark asks what everything around the model costs.

`NBENGINE_BENCH_STEP_SECONDS` is the time of a step. With `NBENGINE_BENCH_TOKEN_LOG` the moment of each step's
end (`time.monotonic()`) goes to that file. `NBENGINE_BENCH_TEXT` names a JSON file with the token ids of a
text, from which each request gets a piece; without it every token is random-tiny's for "a".
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO

from nbengine.config import EngineConfig
from nbengine.executor.base import Executor
from nbengine.ipc.control_messages import WorkerInfo
from nbengine.kv_cache.sizing import RankCacheSpec
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput

TOKEN = 64
PIECES, PIECE_OFFSET = 200, 37


class StepFuture(Future[ModelRunnerOutput | None]):
    """The outcome of a step that ends at `end`. Waiting for it sleeps, so the interpreter is free as with a
    device."""

    def __init__(self, output: ModelRunnerOutput | None, end: float, log: TextIO | None = None) -> None:
        super().__init__()
        self._output, self._end, self._log = output, end, log

    def done(self) -> bool:
        return time.monotonic() >= self._end

    def result(self, timeout: float | None = None) -> ModelRunnerOutput | None:
        del timeout
        remaining = self._end - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)
        if self._log is not None:
            self._log.write(f"{time.monotonic()}\n")
        return self._output


class FixedRateExecutor(Executor):
    """An executor that ends a step every `NBENGINE_BENCH_STEP_SECONDS`, counted from the previous step's
    end."""

    def __init__(self, config: EngineConfig, progress: Any = None, files: Any = None) -> None:
        self._block_size = config.cache.block_size
        self._async_scheduling = bool(config.scheduler.async_scheduling)
        self._step_seconds = float(os.environ.get("NBENGINE_BENCH_STEP_SECONDS", "0.005"))
        log = os.environ.get("NBENGINE_BENCH_TOKEN_LOG")
        self._log = open(log, "a", buffering=1) if log else None  # noqa: SIM115  # closed by shutdown
        text = os.environ.get("NBENGINE_BENCH_TEXT")
        self._text: list[int] = json.loads(Path(text).read_text()) if text else [TOKEN]
        self._end = 0.0
        self._sampled: ModelRunnerOutput | None = None
        self._num_requests = 0
        self._prompt_lengths: dict[str, int] = {}
        self._positions: dict[str, int] = {}
        """The place in the text of each request's next token."""

    def collective_rpc(self, method: str, args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        """Answer only what an engine core asks at its start."""
        answers = {
            "model_info": {
                "device": "cpu",
                "dtype": "float32",
                "weights_bytes": 0,
                "max_position_embeddings": 1 << 20,
                "vocab_size": max(256, *self._text) + 1,
            },
            "get_kv_cache_spec": RankCacheSpec(1, 1, 1, 4, self._block_size),
            "determine_available_memory": 1 << 24,
            "check_kv_cache_fits": None,
            "initialize_kv_cache": None,
            "worker_info": WorkerInfo(0, 0, 0, os.getpid(), "cpu", 4, 1 << 20, 0, 1),
        }
        return [answers[method]]

    @property
    def max_concurrent_batches(self) -> int:
        """Return two with asynchronous scheduling, else one."""
        return 2 if self.async_scheduling else 1

    @property
    def async_scheduling(self) -> bool:
        """Return what the configuration says; it is off by default."""
        return self._async_scheduling

    def execute_model(self, scheduler_output: SchedulerOutput, *, non_block: bool = False) -> Any:
        """Begin a step. As with a real worker, `sample_tokens` returns the outcome of a plan with tokens."""
        output = self._run(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._sampled, output = output, None
            self._end = self._next_end(time.monotonic())
        future = StepFuture(output, self._end)
        return future if non_block else future.result()

    def sample_tokens(self, grammar_output: Any = None, *, non_block: bool = False) -> Any:
        """Return the outcome of the step: each request's token."""
        del grammar_output
        future = StepFuture(self._sampled, self._end, self._log)
        return future if non_block else future.result()

    def _next_end(self, now: float) -> float:
        return max(self._end + self._step_seconds, now)

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        prompt_lengths, positions, text = self._prompt_lengths, self._positions, self._text
        for req_id in plan.finished_req_ids:
            prompt_lengths.pop(req_id, None)
            positions.pop(req_id, None)
        scheduled = plan.num_scheduled_tokens
        computed = {}
        for new in plan.scheduled_new_reqs:
            prompt_lengths[new.req_id] = len(new.token_ids)
            positions[new.req_id] = self._num_requests % PIECES * PIECE_OFFSET
            computed[new.req_id] = new.num_computed_tokens
            self._num_requests += 1
        cached = plan.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for req_id, count in scheduled.items():
            if computed[req_id] + count >= prompt_lengths[req_id]:
                position = positions[req_id]
                sampled.append([text[position % len(text)]])
                positions[req_id] = position + 1
            else:
                sampled.append([])
        return ModelRunnerOutput(list(scheduled), sampled)

    def check_health(self) -> None:
        """Return at once: nothing can be wrong."""

    def shutdown(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


class SerialDeviceExecutor(FixedRateExecutor):
    """An executor whose step takes that time from when it is handed over or the previous one has ended, as on
    a device."""

    def _next_end(self, now: float) -> float:
        return max(self._end, now) + self._step_seconds
