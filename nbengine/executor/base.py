"""The executor: an engine core's way to its workers, however many it has and wherever they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, overload

from nbengine.checks import require
from nbengine.config import EngineConfig
from nbengine.errors import EngineDeadError
from nbengine.ipc.control_messages import WorkerInfo, WorkerPulse
from nbengine.kv_cache.sizing import RankCacheSpec
from nbengine.metrics.stats import WorkerStats
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.progress import ProgressCallback
from nbengine.scheduler.output import (
    AsyncModelRunnerOutput,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)

FailureCallback = Callable[[EngineDeadError], None]


class Executor(ABC):
    """An executor runs the same call on every worker; the constructor of an implementation loads the model.

    An exception in a worker reaches the caller as that exception.
    """

    @abstractmethod
    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressCallback | None = None,
        files: ExecutorFiles | None = None,
    ) -> None:
        """Start the workers and have them load the model.

        `files` names directories for the workers' files; without it, an executor that needs some makes its
        own.

        Raises:
            EngineStartError: the device is missing, or the model does not fit.
            ModelLoadError: the model's files cannot be used.
        """

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
            timeout: seconds to wait for the answers; None: no limit.
            non_block: return at once.
            unique_reply_rank: the only rank that answers, if the others' answers are not needed.

        Returns:
            The answers by rank (`list[Any]`), or with `unique_reply_rank` that rank's; with `non_block` a
                `Future` of it.

        Raises:
            NBEngineError: workers have no such method.
            TimeoutError: not all answers came within `timeout` seconds; the call may still be carried out.
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
        """Run the forward pass of a step; return None if sampling is left to `sample_tokens`.

        Where `max_concurrent_batches` is more than 1, it is left for every plan with tokens.
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

        With pipeline parallelism the masks lie in memory that the next call's masks overwrite: they are read
        before this call returns.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Wait until every worker has answered a call that exercises its device and its group,
        and changes nothing.

        Raises:
            EngineDeadError: the executor has been shut down, or a worker has ended.
        """

    def register_failure_callback(self, callback: FailureCallback) -> None:  # noqa: B027
        """Have `callback` called, on any thread, when workers have ended by themselves,
        also between two calls.

        Workers in this process never end so.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and free their memory; calling it again does nothing."""

    @property
    def max_concurrent_batches(self) -> int:
        """Return the number of steps that may be in flight at once; calls are carried out in their order."""
        return 1

    @property
    def async_scheduling(self) -> bool:
        """Tell whether a step may need tokens that a step in flight has yet to sample;
        the workers fill them in."""
        return False

    @property
    def most_steps(self) -> int:
        """Return how many steps a plan may ask for at once (`SchedulerOutput.num_steps`)."""
        return 1

    def interrupt(self) -> None:  # noqa: B027
        """Have steps that are computed at once end soon, because there is something else to do. Safe on any thread."""

    def execute_dummy_batch(self) -> Future[Any]:
        """Take part in a step of the other engine cores without having work:
        compute this core's share of the experts.

        The call takes its place among the workers' steps, and nobody waits for it.
        """
        done: Future[Any] = self.collective_rpc("execute_dummy_batch", non_block=True)
        return done

    def all_reduce_unfinished(self, unfinished: bool) -> bool:
        """Return whether any engine core has unfinished requests;
        all of them ask, after the same number of steps.

        The question takes its place among the workers' steps.
        """
        answer: bool = self.collective_rpc("all_reduce_unfinished", (unfinished,), unique_reply_rank=0)
        return answer

    def reconfigure_data_parallel(self, before: int, after: int, init_method: str) -> None:
        """Make this engine core one of `after` in lock step instead of one of `before`, between two steps.

        All of them do so after the same steps, including those that come
        (`ParallelConfig.data_parallel_joins_later`) and those that leave. They meet at `init_method` then,
        which must be another place every time.

        Raises:
            EngineStartError: the others cannot be reached.
        """
        self.collective_rpc("reconfigure_data_parallel", (before, after, init_method))

    def model_info(self) -> dict[str, Any]:
        """Describe what was loaded: device, dtype (names), weights_bytes,
        max_position_embeddings, vocab_size."""
        info: dict[str, Any] = self.collective_rpc("model_info")[0]
        return info

    def worker_info(self) -> list[WorkerInfo]:
        """List the workers by rank; the bytes that they hold are complete once they have a KV cache."""
        workers: list[WorkerInfo] = self.collective_rpc("worker_info")
        return workers

    def worker_stats(self) -> list[WorkerStats]:
        """Return what the workers have measured of themselves, by rank, without a call to them.

        Empty if they measure nothing.
        """
        return []

    def worker_pulses(self) -> list[WorkerPulse]:
        """Return what the workers have counted, by rank, without a call to them; on any thread.

        Empty if they count nothing.
        """
        return []

    def determine_available_memory(self) -> list[int]:
        """Return the bytes that the KV cache of each worker may take, by rank."""
        available: list[int] = self.collective_rpc("determine_available_memory")
        return available

    def get_kv_cache_specs(self) -> list[RankCacheSpec]:
        """Return what a token takes in the KV cache of each worker, by rank."""
        specs: list[RankCacheSpec] = self.collective_rpc("get_kv_cache_spec")
        return specs

    def initialize_kv_cache(self, num_blocks: int, num_slots: int = 0) -> None:
        """Allocate the KV cache on every worker: blocks, and slots for recurrent state.

        Raises:
            EngineStartError: the KV cache does not fit.
        """
        # Workers that share a memory all check it before any of them takes some.
        self.collective_rpc("check_kv_cache_fits", (num_blocks, num_slots))
        self.collective_rpc("initialize_kv_cache", (num_blocks, num_slots))


def check_reply_rank(rank: int | None, num_workers: int) -> None:
    """Raise `InvalidArgumentError` unless `rank` is None or a worker's: otherwise nobody would answer."""
    is_one = rank is None or 0 <= rank < num_workers
    require("unique_reply_rank", rank, is_one, f"None or from 0 to {num_workers - 1}")
