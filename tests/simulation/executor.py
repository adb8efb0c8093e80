"""An executor whose model is arithmetic: a request's n-th token follows from its prompt and n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from nbengine.config import EngineConfig
from nbengine.errors import ModelLoadError
from nbengine.executor.base import Executor
from nbengine.ipc.control_messages import Progress, WorkerInfo
from nbengine.kv_cache.sizing import RankCacheSpec
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.progress import ProgressCallback
from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.simulation import state

VOCABULARY = 1000
BLOCK_SIZE = 16
MAX_LENGTH = 64


def token_at(prompt: Sequence[int], position: int) -> int:
    """The token that the model gives at a position of a request's output."""
    return (prompt[0] * 7 + position * 13) % VOCABULARY


class SimExecutor(Executor):
    """One worker, in the engine core's process; a step takes virtual time."""

    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressCallback | None = None,
        files: ExecutorFiles | None = None,
    ) -> None:
        self._world = state.world()
        self._process = state.process()
        self._world.pass_time("load")
        if progress is not None:
            progress(Progress("load", "a model", 0.5))
        self._process.outside("load", opens=True, error=lambda: ModelLoadError("Too many open files"))
        self._prompts: dict[str, list[int]] = {}
        self._num_sampled: dict[str, int] = {}

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        answer = _ANSWERS[method](self)
        if non_block:
            done: Future[Any] = Future()
            done.set_result(answer)
            return done
        return answer

    def execute_model(self, plan: SchedulerOutput, *, non_block: bool = False) -> Any:
        for request in plan.scheduled_new_reqs:
            self._prompts[request.req_id] = request.token_ids
            self._num_sampled[request.req_id] = 0
        for request_id in plan.finished_req_ids:
            self._prompts.pop(request_id, None)
        if plan.total_num_scheduled_tokens:
            self._world.pass_time("step")
        req_ids = list(plan.num_scheduled_tokens)
        sampled = []
        for request_id in req_ids:
            if request_id in plan.incomplete_req_ids:
                sampled.append([])
                continue
            position = self._num_sampled[request_id]
            self._num_sampled[request_id] = position + 1
            sampled.append([token_at(self._prompts[request_id], position)])
        output = ModelRunnerOutput(req_ids, sampled)
        if not non_block:
            return output
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(output)
        return done

    def sample_tokens(self, grammar_output: GrammarOutput | None = None, *, non_block: bool = False) -> Any:
        raise AssertionError("every step samples at once")

    def check_health(self) -> None:
        """Do nothing, since the model is always well."""

    def shutdown(self) -> None:
        self._world.pass_time("unload")


def _model_info(executor: SimExecutor) -> list[dict[str, Any]]:
    return [
        {
            "device": "cpu",
            "dtype": "float32",
            "weights_bytes": 1000,
            "max_position_embeddings": MAX_LENGTH,
            "vocab_size": VOCABULARY,
            "hidden_size": 8,
        }
    ]


def _worker_info(executor: SimExecutor) -> list[WorkerInfo]:
    pid = executor._process.pid
    return [WorkerInfo(0, 0, 0, pid, "cpu", 1000, 1000, 0, 1)]


_ANSWERS: dict[str, Any] = {
    "model_info": _model_info,
    "worker_info": _worker_info,
    "get_kv_cache_spec": lambda _: [RankCacheSpec(1, 1, 8, 4, BLOCK_SIZE)],
    "determine_available_memory": lambda _: [1 << 20],
    "check_kv_cache_fits": lambda _: [None],
    "initialize_kv_cache": lambda _: [None],
}
