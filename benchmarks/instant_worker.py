"""A worker whose step takes as long as it is told to, next to nothing if not: for what reaching a worker costs.

`NBENGINE_BENCH_STEP_SECONDS` is the time of a step.
"""

from __future__ import annotations

import os
import time
from typing import Any

from fake_executor import TOKEN

from nbengine.config import EngineConfig
from nbengine.distributed.layout import ALONE, RankLayout
from nbengine.executor.files import ExecutorFiles
from nbengine.executor.multiproc import MultiprocExecutor
from nbengine.executor.worker_board import WorkerBoard
from nbengine.ipc.control_messages import WorkerInfo
from nbengine.kv_cache.sizing import KVCacheSpec
from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput


class InstantWorker:
    """In place of `nbengine.worker.worker.Worker`; torch-free."""

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
        """There is none."""

    def load_model(self) -> None:
        """There is none."""

    def model_info(self) -> dict[str, Any]:
        """Of a model with room for everything."""
        return {
            "device": "cpu",
            "dtype": "float32",
            "weights_bytes": 0,
            "max_position_embeddings": 1 << 20,
            "vocab_size": 256,
        }

    def worker_info(self) -> WorkerInfo:
        """Who this worker is."""
        layout = self._layout
        return WorkerInfo(layout.rank, layout.tp_rank, layout.pp_rank, os.getpid(), "cpu", 0, 0, 0, 1)

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """The least there can be."""
        return KVCacheSpec(1, 1, 1, 4, self._block_size)

    def determine_available_memory(self) -> int:
        """Enough."""
        return 1 << 24

    def check_kv_cache_fits(self, num_blocks: int) -> None:
        """It does."""

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """There is none."""

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
        """One token a request."""
        del grammar_output
        return ModelRunnerOutput(self._req_ids, [[TOKEN] for _ in self._req_ids])

    def shutdown(self) -> None:
        """Nothing is held."""


class InstantWorkersExecutor(MultiprocExecutor):
    """Such workers in processes of their own."""

    worker_class = "instant_worker:InstantWorker"
