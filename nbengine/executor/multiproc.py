"""The executor whose workers run in their own processes, and are called through queues in shared memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from nbengine.config import EngineConfig
from nbengine.distributed.layout import RankLayout, layouts
from nbengine.errors import (
    EngineDeadError,
    NBEngineError,
    PeerDiedError,
    QueueClosedError,
    WireError,
)
from nbengine.executor.base import Executor, FailureCallback, check_reply_rank
from nbengine.executor.calls import FAILURE, Answer, PendingCalls
from nbengine.executor.failures import FirstCause, WorkerFailure, WorkerReport
from nbengine.executor.watch import Watched, WorkerReady, WorkerWatch
from nbengine.executor.worker_proc import NOBODY, WorkerSpec
from nbengine.ipc.control_messages import Progress, WorkerPulse
from nbengine.ipc.process_state import what_holds
from nbengine.ipc.queues.message_queue import MessageQueue
from nbengine.ipc.queues.queue_files import new_queue_name, remove_queue_files
from nbengine.metrics.stats import WorkerStats
from nbengine.runtime.directories import EngineDirectories
from nbengine.runtime.executor_files import ExecutorFiles, make_own_files
from nbengine.runtime.logs import log_tail, worker_log_path
from nbengine.runtime.nursery import can_adopt, fork_workers
from nbengine.runtime.processes import WorkerProcess, end_processes, start_worker
from nbengine.runtime.progress import ProgressCallback
from nbengine.runtime.worker_board import WorkerBoard
from nbengine.scheduler.output import GrammarOutput, SchedulerOutput

logger = logging.getLogger(__name__)

TAIL_LINES = 15
"""Lines of a worker's log in the error that names the worker."""
SHUTDOWN_GRACE, TERM_GRACE = 2.0, 0.3
"""Seconds that workers get to end by themselves,
and after SIGTERM. The sum is less than a host gives an engine core."""
VERDICT_SECONDS = 30.0
"""Seconds that the thread that watches the workers may take to say why a queue has broken."""
READY_TIMEOUT = 60.0
"""Seconds in which the two ends of a queue must find each other, when all workers have loaded the model."""
FULL_QUEUE_SECONDS = 0.05
"""Seconds to wait for a full queue of calls before answers are taken in,
since their queues may be full, too."""
_BROKEN = (QueueClosedError, PeerDiedError)
"""The errors that a queue raises when an end of it is gone."""


class MultiprocExecutor(Executor):
    """An executor that starts one process for each rank, and broadcasts calls to them.

    The thread that makes the calls takes in the answers. Another thread watches the processes: when one ends,
    or says that it must, every call that waits for an answer, and every later one, raises `EngineDeadError`,
    and the callbacks of `register_failure_callback` are called.

    The workers answer a step once: `execute_model` of a plan with tokens is not answered, `sample_tokens` is.
    """

    worker_class = "nbengine.worker.worker:Worker"
    """The class of worker that each process runs, as "module:Class"."""

    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressCallback | None = None,
        files: ExecutorFiles | None = None,
    ) -> None:
        own: EngineDirectories | None = None
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
        self._queue_names = [new_queue_name() for _ in self._layouts]
        """The names of the workers' queues of answers."""
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
        files = replace(self._files, board=None if self._board is None else str(self._board.path))
        specs = [
            WorkerSpec(config, layout.rank, self.worker_class, handle, files, name, self._own_directories)
            for layout, name in zip(self._layouts, self._queue_names, strict=True)
        ]
        self._watch = WorkerWatch()
        ready = self._start_workers(specs, self._watch, progress)
        if self._board is not None:
            # Every worker has mapped it by now, so that nothing is left of it however the engine ends.
            self._board.unlink()
        self._async_scheduling = ready[0].async_scheduling
        self._response_mqs = [
            self._add_queue(MessageQueue.create_from_handle(ready[layout.rank].response_handle, 0))
            for layout in self._layouts
        ]
        self._monitor = threading.Thread(
            target=self._watch_workers, name="nbengine-worker-monitor", daemon=True
        )
        # The monitor runs first: if a worker ends now, the monitor ends the wait for its queues.
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

    def _start_processes(self, specs: Sequence[WorkerSpec], on_start: Callable[[], None]) -> None:
        """Start the workers' processes and give them their tasks.

        `on_start` is called when they begin to import, which takes seconds.
        """
        for layout, process in zip(self._layouts, self._fresh_processes(on_start), strict=True):
            self._workers.append(Watched.of(layout, process))
        for worker, spec in zip(self._workers, specs, strict=True):
            # The end of a worker that has ended already will be noticed soon.
            with contextlib.suppress(OSError):
                worker.connection.send(spec)

    def _report_start(self, progress: ProgressCallback | None) -> None:
        if progress is not None:
            for layout in self._layouts:
                worker = layout.rank if layout.world_size > 1 else None
                progress(Progress("load", "starting", worker=worker))

    def _fresh_processes(self, on_start: Callable[[], None]) -> Iterable[WorkerProcess]:
        logs = [self._log_path(layout) for layout in self._layouts]
        # A kernel that is restarted is killed with its group; workers in other sessions then remove the
        # directories.
        own_session = self._own_directories is not None
        if len(logs) == 1 or not can_adopt():
            on_start()
            return (start_worker(log, own_session=own_session) for log in logs)
        modules = self.worker_class.partition(":")[0], "nbengine.executor.worker_proc"
        return fork_workers(
            logs, modules, on_start, own_session=own_session, directories=self._own_directories
        )

    def _make_board(self) -> WorkerBoard | None:
        """Make the workers' board; None if it does not fit:
        then the engine runs without statistics of the workers."""
        directory = self._files.shared_memory
        try:
            return WorkerBoard.create(directory, len(self._layouts))
        except OSError as error:
            logger.warning(
                "no statistics of the workers: no room for their board in %s: %s", directory, error
            )
            return None

    def _add_queue(self, queue: MessageQueue) -> MessageQueue:
        self._queues.append(queue)
        return queue

    def _start_workers(
        self, specs: Sequence[WorkerSpec], watch: WorkerWatch, progress: ProgressCallback | None
    ) -> dict[int, WorkerReady]:
        """Start the workers, wait until every one has loaded the model, and pass on what they say meanwhile.

        Raises:
            NBEngineError: a worker has failed; this is the first cause.
        """
        ready: dict[int, WorkerReady] = {}
        first_cause = FirstCause()
        self._start_processes(specs, partial(self._report_start, progress))
        for worker in self._workers:
            watch.add(worker)
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
        """End all calls after a worker has failed in a call in which others wait for it,
        since they take no more calls."""
        worker = self._workers[rank]
        self._fail(WorkerFailure(worker.layout, worker.process.pid, report))
        return self._dead()

    def worker_stats(self) -> list[WorkerStats]:
        return [] if self._board is None else self._board.read()

    def worker_pulses(self) -> list[WorkerPulse]:
        pulses = [] if self._board is None else self._board.pulses()
        for pulse, worker in zip(pulses, self._workers, strict=True):
            pulse.state = what_holds(worker.process.pid)
        return pulses

    # Failures.

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Register a callback as in `Executor`; it is called on the thread that watches the workers."""
        with self._lock:
            self._failure_callbacks.append(callback)
            failure = self._failure
        if failure is not None:
            callback(failure)

    def check_health(self) -> None:
        self.collective_rpc("check_health")

    def _watch_workers(self) -> None:
        """Wait for the end of any worker, and end all calls because of it; the body of the monitor thread."""
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
        """End all calls because of `cause`; only the first call has an effect."""
        error = EngineDeadError(cause.describe(), self._log_failure(cause))
        error.__cause__ = None if cause.report is None else cause.report.error
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            callbacks = list(self._failure_callbacks)
        # It is set before the queues break: those who find one broken wait for it to learn the cause.
        self._has_failed.set()
        for queue in self._queues:
            queue.shutdown()
        for callback in callbacks:
            callback(error)

    def _verdict(self, error: NBEngineError) -> EngineDeadError:
        """Make the error that says why a queue has broken; the watching thread knows, or will in a moment."""
        if not self._closed and not self._has_failed.wait(VERDICT_SECONDS):
            with self._lock:
                self._failure = self._failure or EngineDeadError(f"the workers cannot be reached: {error}")
        return self._dead()

    def _dead(self) -> EngineDeadError:
        if self._failure is None:
            return EngineDeadError("the executor has been shut down")
        # Each caller gets its own copy, because every `raise` adds to an error's traceback.
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
        # Workers that have not all started, or have lost one, may wait for each other until a signal.
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
        # A worker that was killed in its start has left them.
        for name in self._queue_names:
            remove_queue_files(self._files.shared_memory, self._files.sockets, name)
        if self._board is not None:
            self._board.unlink()
        self._calls.fail(self._dead())
        if self._own_directories is not None:
            self._own_directories.remove()

    @property
    def max_concurrent_batches(self) -> int:
        """Return the number of pipeline stages; with a single stage,
        2 with async scheduling and 1 without."""
        return self._pp_size if self._pp_size > 1 else 2 if self._async_scheduling else 1

    @property
    def async_scheduling(self) -> bool:
        return self._async_scheduling


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
