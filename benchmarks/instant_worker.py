"""A worker whose step takes next to no time, or the time that it is told: it shows what reaching it costs.

`NBENGINE_BENCH_STEP_SECONDS` is the time of a step.
"""

from __future__ import annotations

import os
import time
from typing import Any

from fake_executor import TOKEN

from nbengine.config import EngineConfig
from nbengine.distributed.layout import ALONE, RankLayout
from nbengine.executor.multiproc import MultiprocExecutor
from nbengine.ipc.control_messages import WorkerInfo
from nbengine.kv_cache.sizing import RankCacheSpec
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.worker_board import WorkerBoard
from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput


class InstantWorker:
    """A stand-in for `nbengine.worker.worker.Worker`, free of torch."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Any = None,
        layout: RankLayout = ALONE,
        files: ExecutorFiles | None = None,
    ) -> None:
        del progress, files
        self.board = WorkerBoard.private(layout.world_size)
        self._block_size = config.cache.block_size
        self._layout = layout
        self._step_seconds = float(os.environ.get("NBENGINE_BENCH_STEP_SECONDS", "0"))
        self._req_ids: list[str] = []

    def init_device(self) -> None:
        """Do nothing: there is no device."""

    def load_model(self) -> None:
        """Do nothing: there is no model."""

    def model_info(self) -> dict[str, Any]:
        """Describe a model with room for everything."""
        return {
            "device": "cpu",
            "dtype": "float32",
            "weights_bytes": 0,
            "max_position_embeddings": 1 << 20,
            "vocab_size": 256,
        }

    def worker_info(self) -> WorkerInfo:
        """Return which worker this is."""
        layout = self._layout
        return WorkerInfo(layout.rank, layout.tp_rank, layout.pp_rank, os.getpid(), "cpu", 0, 0, 0, 1)

    def get_kv_cache_spec(self) -> RankCacheSpec:
        """Return the smallest specification that there can be."""
        return RankCacheSpec(1, 1, 1, 4, self._block_size)

    def determine_available_memory(self) -> int:
        """Return enough bytes."""
        return 1 << 24

    def check_kv_cache_fits(self, num_blocks: int, num_slots: int) -> None:
        """Return at once: the cache fits."""

    def initialize_kv_cache(self, num_blocks: int, num_slots: int) -> None:
        """Do nothing: there is no cache."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Take the time of a step."""
        req_ids = list(plan.num_scheduled_tokens)
        if not req_ids:
            return ModelRunnerOutput([], [])
        self._req_ids = req_ids
        if self._step_seconds:
            time.sleep(self._step_seconds)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Return one token for each request."""
        del grammar_output
        return ModelRunnerOutput(self._req_ids, [[TOKEN] for _ in self._req_ids])

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""


class InstantWorkersExecutor(MultiprocExecutor):
    """An executor that has such workers in their own processes."""

    worker_class = "instant_worker:InstantWorker"
