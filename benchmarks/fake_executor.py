"""An executor without a model: every request gets random-tiny's token for "a" at a fixed rate.

It stands in where a benchmark asks what everything around the model costs. `NBENGINE_BENCH_STEP_SECONDS` is the
time of a step; with `NBENGINE_BENCH_TOKEN_LOG` the moment of each step's end (`time.monotonic()`) goes to that file.
"""

from __future__ import annotations

import os
import time
from typing import Any

from nbengine.config import EngineConfig
from nbengine.executor.base import Executor
from nbengine.kv_cache.sizing import KVCacheSpec
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput

TOKEN = 64


class FixedRateExecutor(Executor):
    """Ends a step every so many seconds, counted from the previous step's end."""

    def __init__(self, config: EngineConfig, progress: Any = None) -> None:
        self._block_size = config.cache.block_size
        self._step_seconds = float(os.environ.get("NBENGINE_BENCH_STEP_SECONDS", "0.005"))
        log = os.environ.get("NBENGINE_BENCH_TOKEN_LOG")
        self._log = open(log, "a", buffering=1) if log else None  # noqa: SIM115  # closed by shutdown
        self._due = 0.0
        self._known: dict[str, list[int]] = {}
        """Tokens that a request has, and tokens computed so far."""

    def collective_rpc(self, method: str, args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        """Only what an engine core asks at its start."""
        answers = {
            "model_info": {
                "device": "cpu",
                "dtype": "float32",
                "weights_bytes": 0,
                "max_position_embeddings": 1 << 20,
                "vocab_size": 256,
            },
            "get_kv_cache_spec": KVCacheSpec(1, 1, 1, 4, self._block_size),
            "determine_available_memory": 1 << 24,
            "initialize_kv_cache": None,
        }
        return [answers[method]]

    def execute_model(self, scheduler_output: SchedulerOutput, *, non_block: bool = False) -> Any:
        """Wait for the end of the step, then say which requests get a token."""
        for new in scheduler_output.scheduled_new_reqs:
            self._known[new.req_id] = [len(new.token_ids), new.num_computed_tokens]
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._known[req_id][1] = computed
        for req_id in scheduler_output.finished_req_ids:
            self._known.pop(req_id, None)
        sampled = []
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            state = self._known[req_id]
            done = state[1] + count >= state[0]
            state[0] += done
            sampled.append([TOKEN] if done else [])
        self._wait()
        output = ModelRunnerOutput(list(scheduler_output.num_scheduled_tokens), sampled)
        if non_block:
            from concurrent.futures import Future

            future: Future[ModelRunnerOutput] = Future()
            future.set_result(output)
            return future
        return output

    def _wait(self) -> None:
        now = time.monotonic()
        self._due = max(self._due + self._step_seconds, now)
        time.sleep(self._due - now)
        if self._log is not None:
            self._log.write(f"{time.monotonic()}\n")

    def sample_tokens(self, grammar_output: None = None) -> ModelRunnerOutput:
        """Never called: `execute_model` samples."""
        raise NotImplementedError

    def check_health(self) -> None:
        """Nothing can be wrong."""

    def shutdown(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
