"""The executor with one worker, in the process of its engine core."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from nbengine.config import EngineConfig
from nbengine.distributed.layout import RankLayout
from nbengine.errors import EngineDeadError, NBEngineError, PeerDiedError, QueueClosedError
from nbengine.executor.async_scheduling import schedules_asynchronously
from nbengine.executor.base import Executor, check_reply_rank
from nbengine.executor.failures import SETTLE_SECONDS
from nbengine.ipc.control_messages import WorkerPulse
from nbengine.metrics.stats import WorkerStats
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.progress import ProgressCallback
from nbengine.scheduler.output import AsyncModelRunnerOutput, GrammarOutput, SchedulerOutput
from nbengine.worker.worker import Worker

T = TypeVar("T")


class UniProcExecutor(Executor):
    """An executor that calls its worker directly: a call is done when it returns, so that no timeout passes.

    With async scheduling one other thread makes the calls, in their order, while the engine core prepares the
    next step. torch releases the interpreter while it computes.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressCallback | None = None,
        files: ExecutorFiles | None = None,
    ) -> None:
        is_async = schedules_asynchronously(config)
        scheduler = replace(config.scheduler, async_scheduling=is_async)
        # The only worker of an engine core meets no others in it, only those of other cores.
        parallel = replace(config.parallel, distributed_init_method=None)
        config = replace(config, scheduler=scheduler, parallel=parallel)
        self._thread = ThreadPoolExecutor(1, "nbengine-worker") if is_async else None
        self._worker: Worker | None = Worker(config, progress, RankLayout.of(0, parallel), files)
        self._board = self._worker.board
        self._has_peers = config.lock_step
        try:
            self._call(self._worker.init_device)
            self._call(self._worker.load_model)
        except BaseException:
            self.shutdown()
            raise

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,  # noqa: ARG002
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        check_reply_rank(unique_reply_rank, 1)
        function = None if method.startswith("_") else getattr(self._alive(), method, None)
        if not callable(function):
            raise NBEngineError(f"workers have no method {method!r}")
        if unique_reply_rank is not None:
            return self._call(lambda: function(*args, **(kwargs or {})), non_block=non_block)
        return self._call(lambda: [function(*args, **(kwargs or {}))], non_block=non_block)

    def execute_model(self, scheduler_output: SchedulerOutput, *, non_block: bool = False) -> Any:
        worker = self._alive()
        return self._call(lambda: worker.execute_model(scheduler_output), non_block=non_block)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None, *, non_block: bool = False) -> Any:
        worker = self._alive()
        output = self._call(lambda: worker.sample_tokens(grammar_output), non_block=non_block)
        return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output

    def worker_stats(self) -> list[WorkerStats]:
        return self._board.read()

    def worker_pulses(self) -> list[WorkerPulse]:
        return self._board.pulses()

    def check_health(self) -> None:
        self.collective_rpc("check_health")

    def shutdown(self) -> None:
        """End the thread, which finishes the call that it is in, and free the worker's memory."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    @property
    def most_steps(self) -> int:
        return self._alive().most_steps

    def interrupt(self) -> None:
        # Another thread may be shutting the executor down.
        worker = self._worker
        if worker is not None:
            worker.interrupt()

    @property
    def max_concurrent_batches(self) -> int:
        return 1 if self._thread is None else 2

    @property
    def async_scheduling(self) -> bool:
        return self._thread is not None

    def _alive(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("the executor has been shut down")
        return self._worker

    def _call(self, call: Callable[[], T], *, non_block: bool = False) -> T | Future[T]:
        function = partial(_settled, call) if self._has_peers else call
        if self._thread is not None:
            future = self._thread.submit(function)
            return future if non_block else future.result()
        return _completed(function) if non_block else function()


def _settled(call: Callable[[], T]) -> T:
    """Return what `call` returns; raise the loss of a peer with a delay.

    The process that watches the peer must know of its end, the cause, before.
    """
    try:
        return call()
    except (PeerDiedError, QueueClosedError):
        time.sleep(SETTLE_SECONDS)
        raise


def _completed(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001  # those who ask the future get it
        future.set_exception(error)
    return future
