"""The process of one worker, between a queue of calls and a queue of answers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, cast

from nbengine.cluster.models import with_model_here
from nbengine.config import EngineConfig
from nbengine.distributed.layout import RankLayout
from nbengine.errors import NBEngineError, PeerDiedError, QueueClosedError
from nbengine.executor.async_scheduling import schedules_asynchronously
from nbengine.executor.calls import FAILURE, SUCCESS
from nbengine.executor.failures import WorkerReport
from nbengine.executor.watch import WorkerReady
from nbengine.ipc.control_messages import Progress
from nbengine.ipc.queues.message_queue import Handle, MessageQueue
from nbengine.runtime.directories import EngineDirectories
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.imports import imports_that_stay
from nbengine.scheduler.output import AsyncModelRunnerOutput

logger = logging.getLogger(__name__)

NOBODY = -1
"""The output rank of a call that is not answered. If it fails, its worker ends and says so over its line."""
EXECUTOR_GONE = 2
"""The exit status of a worker whose executor's process has ended."""
ANSWER_BYTES = 1 << 18
"""Bytes up to which an answer goes through shared memory: a step of 256 requests with ten log probabilities
each has 60 KB."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The data that a worker needs; it is the only message that its executor sends over the line."""

    config: EngineConfig
    rank: int
    worker_class: str
    """The class of the worker, as "module:Class"."""
    rpc_handle: Handle
    """The handle of the queue of calls, each a `(method, args, kwargs, output rank)`."""
    files: ExecutorFiles
    queue_name: str
    """The name of the queue of answers: if the worker is killed, its executor removes the queue's files."""
    own_directories: EngineDirectories | None
    """The directories of an executor without a host:
    if its process ends without removing them, every worker tries to."""
    answer_address: str | None = None
    """The address from which an executor on another machine takes the answers; None: it is on this one."""

    @property
    def layout(self) -> RankLayout:
        """Return the worker's place among the ranks."""
        return RankLayout.of(self.rank, self.config.parallel)


class WorkerProc:
    """A worker that loads the model, then carries out calls in their order.

    Raises:
        Exception: the worker cannot be started; `WorkerReport` tells its executor.
    """

    def __init__(self, spec: WorkerSpec, connection: Connection[Any, Any]) -> None:
        self._rank = spec.rank
        self._connection = connection
        # The loader may report from its own thread.
        self._connection_lock = threading.Lock()
        self._progress_rank = spec.rank if spec.config.parallel.world_size > 1 else None
        self._rpc_broadcast_mq = MessageQueue.create_from_handle(spec.rpc_handle, spec.rank)
        config = spec.config
        if spec.answer_address is not None:
            config = with_model_here(config, self._report_progress)
        self._async_scheduling = schedules_asynchronously(config)
        config = replace(config, scheduler=replace(config.scheduler, async_scheduling=self._async_scheduling))
        worker_class = _load_class(spec.worker_class)
        self.worker = worker_class(config, self._report_progress, spec.layout, spec.files)
        self.worker.init_device()
        self.worker.load_model()
        self._worker_response_mq = MessageQueue(
            1,
            1 if spec.answer_address is None else 0,
            directory=spec.files.shared_memory,
            socket_directory=spec.files.sockets,
            remote_address=spec.answer_address,
            max_chunk_bytes=ANSWER_BYTES,
            name=spec.queue_name,
        )
        self._async_output_queue: SimpleQueue[tuple[str, Any] | None] = SimpleQueue()
        self._async_output_thread = threading.Thread(
            target=self._async_output_busy_loop, name="nbengine-worker-output", daemon=True
        )

    def start(self) -> None:
        """Say READY, and wait until the executor is at the other ends of both queues."""
        gc.collect()
        # The loaded objects stay: the collector need not look at them again in the middle of a step.
        gc.freeze()
        handle = self._worker_response_mq.export_handle()
        self._tell(WorkerReady(handle, self._async_scheduling))
        # No time-out: the others may take any time to load, and if the executor ends, this process does, too.
        self._rpc_broadcast_mq.wait_until_ready()
        self._worker_response_mq.wait_until_ready()
        if self._async_scheduling:
            self._async_output_thread.start()
        logger.info("rank %d takes calls", self._rank)

    def worker_busy_loop(self) -> int:
        """Carry out calls until the executor shuts the queue down, and return the process's exit status."""
        try:
            while self._call(*self._rpc_broadcast_mq.dequeue()):
                pass
        except QueueClosedError:
            return 0
        except PeerDiedError as error:
            logger.error("the executor is gone: %s", error)
            return EXECUTOR_GONE
        except Exception as error:  # noqa: BLE001  # a call is lost, and with it the order of the answers
            self._tell_failure("the queue of calls", error)
        return 1

    def shutdown(self) -> None:
        """Finish the outputs that are on their way, then free what the worker holds."""
        if self._async_output_thread.is_alive():
            self._async_output_queue.put(None)
            self._async_output_thread.join()
        self.worker.shutdown()
        for queue in (self._worker_response_mq, self._rpc_broadcast_mq):
            queue.shutdown()
            queue.close()

    def _call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], output_rank: int | None
    ) -> bool:
        """Carry out one call; return False after a failure of a call whose answer nobody waits for."""
        is_asked = output_rank is None or output_rank == self._rank
        try:
            output = self._method(method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # it is the answer
            if not is_asked:
                self._tell_failure(method, error)
                return False
            output = WorkerReport.of(method, error)
            output.log("this worker")
        if is_asked:
            self._handle_output(method, output)
        return True

    def _method(self, name: str) -> Callable[..., Any]:
        function = None if name.startswith("_") else getattr(self.worker, name, None)
        if not callable(function):
            raise NBEngineError(f"workers have no method {name!r}")
        return cast("Callable[..., Any]", function)

    def _handle_output(self, method: str, output: Any) -> None:
        if self._async_scheduling:
            self._async_output_queue.put((method, output))
        else:
            self._enqueue_output(method, output)

    def _async_output_busy_loop(self) -> None:
        """Wait for outputs that are on their way from the device, so that the next call need not."""
        with contextlib.suppress(QueueClosedError, PeerDiedError):
            while (item := self._async_output_queue.get()) is not None:
                self._enqueue_output(*item)
                # What the output holds is let go before the wait for the next one.
                del item

    def _enqueue_output(self, method: str, output: Any) -> None:
        try:
            if isinstance(output, AsyncModelRunnerOutput):
                output = output.get_output()
            status = FAILURE if isinstance(output, WorkerReport) else SUCCESS
            self._worker_response_mq.enqueue((status, output))
        except (QueueClosedError, PeerDiedError):
            raise
        except Exception as error:  # noqa: BLE001  # the output did not arrive, or cannot be pickled
            report = WorkerReport.of(method, error)
            report.log("this worker")
            self._worker_response_mq.enqueue((FAILURE, report))

    def _report_progress(self, progress: Progress) -> None:
        progress.worker = self._progress_rank
        self._tell(progress)

    def _tell_failure(self, doing: str, error: Exception) -> None:
        report = WorkerReport.of(doing, error)
        report.log("this worker")
        self._tell(report)

    def _tell(self, message: Progress | WorkerReady | WorkerReport) -> None:
        with self._connection_lock:
            self._connection.send(message)


def run_worker(spec: WorkerSpec, connection: Connection[Any, Any]) -> int:
    """Run a worker from its start to its end, and return the process's exit status."""
    try:
        worker = WorkerProc(spec, connection)
        worker.start()
    except Exception as error:  # noqa: BLE001  # it is reported
        report = WorkerReport.of("start", error)
        report.log("this worker")
        logger.error("did not start: %s", report.description)
        # The executor may be the reason: then it is gone.
        with contextlib.suppress(OSError):
            connection.send(report)
        return 1
    status = worker.worker_busy_loop()
    # After a failure the others may be inside an operation that this worker takes part in: no orderly end is
    # possible.
    if status == 0:
        worker.shutdown()
    return status


def _load_class(path: str) -> Any:
    module, _, name = path.partition(":")
    with imports_that_stay():
        return getattr(importlib.import_module(module), name)
