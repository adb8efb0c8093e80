"""Workers in processes of their own, called through queues in shared memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from nbengine.config import EngineConfig
from nbengine.distributed.layout import RankLayout, layouts
from nbengine.engine.logs import log_tail, worker_log_path
from nbengine.engine.processes import end_processes, start_worker
from nbengine.errors import (
    EngineDeadError,
    EngineStartError,
    NBEngineError,
    PeerDiedError,
    QueueClosedError,
    WireError,
)
from nbengine.executor.base import Executor, FailureCallback, check_reply_rank
from nbengine.executor.calls import FAILURE, Answer, PendingCalls
from nbengine.executor.failures import SETTLE_SECONDS, FirstCause, WorkerFailure, WorkerReport
from nbengine.executor.files import ExecutorFiles, OwnDirectories, make_own_files
from nbengine.executor.watch import Watched, WorkerReady, WorkerWatch
from nbengine.executor.worker_board import WorkerBoard
from nbengine.executor.worker_proc import NOBODY, WorkerSpec
from nbengine.ipc.message_queue import MessageQueue
from nbengine.metrics.stats import WorkerStats
from nbengine.models.progress import ProgressCallback
from nbengine.scheduler.output import GrammarOutput, SchedulerOutput

logger = logging.getLogger(__name__)

TAIL_LINES = 15
"""Of a worker's log, in the error that names it."""
SHUTDOWN_GRACE, TERM_GRACE = 1.0, 0.3
"""Seconds that workers get to end by themselves, and after SIGTERM. Together less than a host gives an engine core."""
VERDICT_SECONDS = 2 * SETTLE_SECONDS
"""How long the thread that watches the workers may take to say why a queue has broken."""
READY_TIMEOUT = 60.0
"""Seconds for the two ends of a queue to find each other, when all workers have loaded the model."""
FULL_QUEUE_SECONDS = 0.05
"""How long a full queue of calls is waited for before answers are taken in, whose queues may be full, too."""
_BROKEN = (QueueClosedError, PeerDiedError)
"""What a queue raises when an end of it is gone."""


class MultiprocExecutor(Executor):
    """Starts one process a rank, and broadcasts calls to them.

    The thread that makes the calls takes in the answers. Another one watches the processes: when one ends, or says that
    it must, every call that waits for an answer, and every later one, raises `EngineDeadError`, and the callbacks of
    `register_failure_callback` are called.

    A step is answered once: `execute_model` of a plan with tokens leaves its outcome to `sample_tokens`, and so does its
    answer.
    """

    worker_class = "nbengine.worker.worker:Worker"
    """What each process runs, as "module:Class"."""

    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressCallback | None = None,
        files: ExecutorFiles | None = None,
    ) -> None:
        own = OwnDirectories()
        if files is None:
            files, own = make_own_files()
        self._files = files
        self._own_directories = own
        self._layouts = list(layouts(config.parallel))
        self._output_rank = self._layouts[-1].rank - self._layouts[-1].tp_rank
        self._pp_size = config.parallel.pipeline_parallel_size
        self._async_scheduling = False
        self._workers: list[Watched] = []
        self._queues: list[MessageQueue] = []
        self._response_mqs: list[MessageQueue] = []
        self._calls = PendingCalls(self._receive, self._give_up)
        self._lock = threading.Lock()
        self._failure: EngineDeadError | None = None
        self._has_failed = threading.Event()
        self._failure_callbacks: list[FailureCallback] = []
        self._closed = False
        self._board: WorkerBoard | None = None
        self._watch: WorkerWatch | None = None
        self._monitor: threading.Thread | None = None
        try:
            self._start(self._complete_config(config), progress)
        except BaseException:
            self.shutdown()
            raise

    # Start.

    def _complete_config(self, config: EngineConfig) -> EngineConfig:
        parallel = config.parallel
        if parallel.distributed_init_method is None:
            rendezvous = f"file://{self._files.shared_memory}/rendezvous-{secrets.token_hex(4)}"
            parallel = replace(parallel, distributed_init_method=rendezvous)
        return replace(config, parallel=parallel)

    def _start(self, config: EngineConfig, progress: ProgressCallback | None) -> None:
        self._rpc_broadcast_mq = self._add_queue(self._make_call_queue())
        handle = self._rpc_broadcast_mq.export_handle()
        self._board = self._make_board()
        files = replace(self._files, board=str(self._board.path))
        for layout in self._layouts:
            spec = WorkerSpec(config, layout.rank, self.worker_class, handle, files, self._own_directories)
            self._start_worker(layout, spec)
        self._watch = WorkerWatch(self._workers)
        ready = self._wait_for_ready(self._watch, progress)
        self._board.unlink()
        self._async_scheduling = ready[0].async_scheduling
        self._response_mqs = [
            self._add_queue(MessageQueue.create_from_handle(ready[layout.rank].response_handle, 0))
            for layout in self._layouts
        ]
        self._monitor = threading.Thread(
            target=self._watch_workers, name="nbengine-worker-monitor", daemon=True
        )
        self._monitor.start()
        try:
            for queue in self._queues:
                queue.wait_until_ready(READY_TIMEOUT)
        except _BROKEN as error:
            broken = error
        else:
            return
        raise self._verdict(broken)

    def _make_call_queue(self) -> MessageQueue:
        return MessageQueue(
            len(self._layouts), directory=self._files.shared_memory, socket_directory=self._files.sockets
        )

    def _start_worker(self, layout: RankLayout, spec: WorkerSpec) -> None:
        # A kernel that is restarted is killed with its group; who is left then removes the directories.
        own_session = bool(self._own_directories.paths)
        worker = Watched.of(layout, start_worker(self._log_path(layout), own_session=own_session))
        self._workers.append(worker)
        # A worker that has ended already is heard of soon.
        with contextlib.suppress(OSError):
            worker.connection.send(spec)

    def _make_board(self) -> WorkerBoard:
        directory = self._files.shared_memory
        try:
            return WorkerBoard.create(directory, len(self._layouts))
        except OSError as error:
            raise EngineStartError(f"no room for the workers' board in {directory}: {error}") from error

    def _add_queue(self, queue: MessageQueue) -> MessageQueue:
        self._queues.append(queue)
        return queue

    def _wait_for_ready(
        self, watch: WorkerWatch, progress: ProgressCallback | None
    ) -> dict[int, WorkerReady]:
        """Wait until every worker has loaded the model, and pass on what they say meanwhile.

        Raises:
            NBEngineError: one has failed; the first cause.
        """
        ready: dict[int, WorkerReady] = {}
        first_cause = FirstCause()
        while len(ready) < len(self._layouts):
            for layout, message in watch.wait(first_cause.time_left(time.monotonic())):
                if isinstance(message, WorkerReady):
                    ready[layout.rank] = message
                elif isinstance(message, WorkerFailure):
                    first_cause.add(message, time.monotonic())
                elif progress is not None:
                    progress(message)
            cause = first_cause.decide(time.monotonic())
            if cause is not None:
                raise cause.start_error(self._log_failure(cause))
        return ready

    # Calls.

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
        check_reply_rank(unique_reply_rank, len(self._layouts))
        if self._failure is not None or self._closed:
            raise self._dead()
        self._broadcast((method, tuple(args), dict(kwargs or {}), unique_reply_rank))
        if unique_reply_rank is None:
            future = self._calls.add(range(len(self._layouts)))
        else:
            future = self._calls.add((unique_reply_rank,), unique=True)
        return future if non_block else future.result(timeout)

    def execute_model(self, scheduler_output: SchedulerOutput, *, non_block: bool = False) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return self._call_model("execute_model", scheduler_output, non_block=non_block)
        if self._failure is not None or self._closed:
            raise self._dead()
        self._broadcast(("execute_model", (scheduler_output,), {}, NOBODY))
        return _done() if non_block else None

    def sample_tokens(self, grammar_output: GrammarOutput | None = None, *, non_block: bool = False) -> Any:
        return self._call_model("sample_tokens", grammar_output, non_block=non_block)

    def _call_model(self, method: str, argument: Any, *, non_block: bool) -> Any:
        return self.collective_rpc(
            method, (argument,), non_block=non_block, unique_reply_rank=self._output_rank
        )

    def _broadcast(self, call: tuple[Any, ...]) -> None:
        """Write a call into the queue that all workers read."""
        while True:
            try:
                self._rpc_broadcast_mq.enqueue(call, FULL_QUEUE_SECONDS)
            except TimeoutError:
                # A worker whose answers nobody takes in takes no calls, either.
                self._calls.poll()
            except _BROKEN as error:
                broken = error
                break
            else:
                return
        raise self._verdict(broken)

    def _receive(self, rank: int, timeout: float | None) -> Answer:
        try:
            answer: Answer = self._response_mqs[rank].dequeue(timeout)
        except WireError as error:
            return FAILURE, WorkerReport.of("an answer", error)
        except _BROKEN as error:
            broken = error
        else:
            return answer
        raise self._verdict(broken)

    def _give_up(self, rank: int, report: WorkerReport) -> Exception:
        """A worker has failed in a call that others wait for it in: they take no part in anything any more."""
        worker = self._workers[rank]
        self._fail(WorkerFailure(worker.layout, worker.process.pid, report))
        return self._dead()

    def worker_stats(self) -> list[WorkerStats]:
        return [] if self._board is None else self._board.read()

    # Failures.

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """See `Executor.register_failure_callback`; it is called on the thread that watches the workers."""
        with self._lock:
            self._failure_callbacks.append(callback)
            failure = self._failure
        if failure is not None:
            callback(failure)

    def check_health(self) -> None:
        if self._failure is not None or self._closed:
            raise self._dead()

    def _watch_workers(self) -> None:
        """Body of the monitor thread: wait for the end of any worker, and say what it means."""
        watch, first_cause = self._watch, FirstCause()
        while watch is not None and not self._closed:
            for _, message in watch.wait(first_cause.time_left(time.monotonic())):
                if isinstance(message, WorkerFailure):
                    first_cause.add(message, time.monotonic())
            cause = first_cause.decide(time.monotonic())
            if cause is not None and not self._closed:
                self._fail(cause)
                return

    def _fail(self, cause: WorkerFailure) -> None:
        """End all calls because of `cause`; only the first time does it have an effect."""
        error = EngineDeadError(cause.describe(), self._log_failure(cause))
        error.__cause__ = None if cause.report is None else cause.report.error
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            callbacks = list(self._failure_callbacks)
        self._has_failed.set()
        for queue in self._queues:
            queue.shutdown()
        for callback in callbacks:
            callback(error)

    def _verdict(self, error: NBEngineError) -> EngineDeadError:
        """Why a queue has broken: the watching thread knows, or will in a moment."""
        if not self._closed and not self._has_failed.wait(VERDICT_SECONDS):
            with self._lock:
                self._failure = self._failure or EngineDeadError(f"the workers cannot be reached: {error}")
        return self._dead()

    def _dead(self) -> EngineDeadError:
        if self._failure is None:
            return EngineDeadError("the executor has been shut down")
        error = copy.copy(self._failure)
        error.__cause__ = self._failure.__cause__
        return error

    def _log_failure(self, cause: WorkerFailure) -> str:
        """Write a failure to this process's log, and return the last lines of the worker's."""
        tail = self._log_tail(cause.layout)
        lines = "".join(f"\n    {line}" for line in tail.splitlines())
        logger.error("%s%s", cause.describe(), lines and f"; the last lines of its log:{lines}")
        return tail

    def _log_tail(self, layout: RankLayout) -> str:
        path = self._log_path(layout)
        return "" if path is None else log_tail(path, TAIL_LINES)

    def _log_path(self, layout: RankLayout) -> str | None:
        log = self._files.log
        return None if log is None else str(worker_log_path(log, layout.number))

    # The end.

    def shutdown(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for queue in self._queues:
            queue.shutdown()
        in_order = self._monitor is not None and self._failure is None
        end_processes(
            [worker.process for worker in self._workers], SHUTDOWN_GRACE if in_order else 0, TERM_GRACE
        )
        if self._watch is not None:
            self._watch.wake()
            if self._monitor is not None:
                self._monitor.join()
            self._watch.close()
        for worker in self._workers:
            worker.close()
        for queue in self._queues:
            queue.close()
        if self._board is not None:
            self._board.unlink()
        self._calls.fail(self._dead())
        self._own_directories.remove()

    @property
    def max_concurrent_batches(self) -> int:
        """As many as there are pipeline stages; without several of them, two with async scheduling."""
        return self._pp_size if self._pp_size > 1 else 2 if self._async_scheduling else 1

    @property
    def async_scheduling(self) -> bool:
        return self._async_scheduling


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
