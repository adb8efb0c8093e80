"""How an engine core reaches its workers, however many there are and wherever they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, overload

from nbengine.checks import require
from nbengine.config import EngineConfig
from nbengine.errors import EngineDeadError
from nbengine.executor.files import ExecutorFiles
from nbengine.ipc.control_messages import WorkerInfo
from nbengine.kv_cache.sizing import KVCacheSpec
from nbengine.metrics.stats import WorkerStats
from nbengine.models.progress import ProgressCallback
from nbengine.scheduler.output import (
    AsyncModelRunnerOutput,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)

FailureCallback = Callable[[EngineDeadError], None]


class Executor(ABC):
    """Runs the same call on every worker; the constructor of an implementation loads the model.

    A failure in a worker reaches the caller as the exception it was.
    """

    @abstractmethod
    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressCallback | None = None,
        files: ExecutorFiles | None = None,
    ) -> None:
        """Start the workers and have them load the model.

        `files` is where they may leave files; without it an executor that needs some makes a directory of its own.

        Raises:
            EngineStartError: the device is missing, or the model does not fit.
            ModelLoadError: the model's files cannot be used.
        """

    @staticmethod
    def get_class(config: EngineConfig) -> type[Executor]:
        """Choose the executor that a configuration asks for."""
        parallel = config.parallel
        backend = parallel.distributed_executor_backend
        if backend == "ray":
            from nbengine.executor.ray import RayExecutor

            return RayExecutor
        if backend == "mp" or parallel.world_size > 1:
            from nbengine.executor.multiproc import MultiprocExecutor

            return MultiprocExecutor
        from nbengine.executor.uniproc import UniProcExecutor

        return UniProcExecutor

    @abstractmethod
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
        """Call a method of every worker.

        Args:
            timeout: seconds to wait for the answers, None for as long as it takes.
            non_block: return at once.
            unique_reply_rank: the only rank that answers, where the others' answers are not needed.

        Returns:
            The answers by rank (`list[Any]`), or with `unique_reply_rank` the one; with `non_block` a `Future` of that.

        Raises:
            NBEngineError: workers have no such method.
            TimeoutError: not all answers have come in time; the call may still be carried out.
            EngineDeadError: the executor has been shut down, or a worker has ended.
        """

    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, *, non_block: Literal[False] = False
    ) -> ModelRunnerOutput | None: ...

    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, *, non_block: Literal[True]
    ) -> Future[ModelRunnerOutput | None]: ...

    @abstractmethod
    def execute_model(
        self, scheduler_output: SchedulerOutput, *, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Run the forward pass of a step. None means that sampling is left to `sample_tokens`.

        Where `max_concurrent_batches` is more than 1 it is left so for every plan with tokens.
        """

    @overload
    def sample_tokens(
        self, grammar_output: GrammarOutput | None = None, *, non_block: Literal[False] = False
    ) -> ModelRunnerOutput: ...

    @overload
    def sample_tokens(
        self, grammar_output: GrammarOutput | None = None, *, non_block: Literal[True]
    ) -> Future[ModelRunnerOutput | AsyncModelRunnerOutput]: ...

    @abstractmethod
    def sample_tokens(
        self, grammar_output: GrammarOutput | None = None, *, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | AsyncModelRunnerOutput]:
        """Sample the step that `execute_model` left waiting, the latest one.

        With pipeline parallelism the masks lie in memory that the next call's overwrite: they are read before this one
        returns.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise `EngineDeadError` unless all workers can take calls."""

    def register_failure_callback(self, callback: FailureCallback) -> None:  # noqa: B027
        """Have `callback` called, on any thread, when workers have ended by themselves, also between two calls.

        Of workers in this process there is nothing to tell.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and free their memory; calling it again does nothing."""

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once; calls are carried out in the order in which they are made."""
        return 1

    @property
    def async_scheduling(self) -> bool:
        """Whether a step may need tokens that a step in flight has yet to sample: the workers fill them in."""
        return False

    def execute_dummy_batch(self) -> Future[Any]:
        """Take part in a step of the other engine cores without having work: compute this one's share of the experts.

        It takes its place among the steps that the workers have been given, and is not waited for.
        """
        done: Future[Any] = self.collective_rpc("execute_dummy_batch", non_block=True)
        return done

    def all_reduce_unfinished(self, unfinished: bool) -> bool:
        """Whether any engine core has unfinished requests; all of them ask, after the same number of steps.

        The question takes its place among the steps that the workers have been given.
        """
        answer: bool = self.collective_rpc("all_reduce_unfinished", (unfinished,), unique_reply_rank=0)
        return answer

    def reconfigure_data_parallel(self, before: int, after: int, init_method: str) -> None:
        """Make this engine core one of `after` in lock step instead of one of `before`, between two steps; all of them, those
        that come (`ParallelConfig.data_parallel_joins_later`) or leave too, do so after the same steps.

        `init_method` is where they meet then, which must be another place every time.

        Raises:
            EngineStartError: the others cannot be reached.
        """
        self.collective_rpc("reconfigure_data_parallel", (before, after, init_method))

    def model_info(self) -> dict[str, Any]:
        """What was loaded: device, dtype (names), weights_bytes, max_position_embeddings, vocab_size."""
        info: dict[str, Any] = self.collective_rpc("model_info")[0]
        return info

    def worker_info(self) -> list[WorkerInfo]:
        """The workers, by rank; what they hold is complete once they have a KV cache."""
        workers: list[WorkerInfo] = self.collective_rpc("worker_info")
        return workers

    def worker_stats(self) -> list[WorkerStats]:
        """What the workers have measured of themselves, by rank, read without a call to them.

        Empty if they measure nothing.
        """
        return []

    def determine_available_memory(self) -> list[int]:
        """Bytes that the KV cache of each worker may take, by rank."""
        available: list[int] = self.collective_rpc("determine_available_memory")
        return available

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        """What a token leaves in the KV cache of each worker, by rank."""
        specs: list[KVCacheSpec] = self.collective_rpc("get_kv_cache_spec")
        return specs

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache on every worker.

        Raises:
            EngineStartError: it does not fit.
        """
        # Workers that share a memory look at it before any of them takes some.
        self.collective_rpc("check_kv_cache_fits", (num_blocks,))
        self.collective_rpc("initialize_kv_cache", (num_blocks,))


def check_reply_rank(rank: int | None, num_workers: int) -> None:
    """Raise `InvalidArgumentError` unless there is such a worker; nobody would answer."""
    is_one = rank is None or 0 <= rank < num_workers
    require("unique_reply_rank", rank, is_one, f"None or from 0 to {num_workers - 1}")
