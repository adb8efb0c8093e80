"""WorkerProc: one worker in a process of its own, between a queue of calls and a queue of answers."""

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
from nbengine.executor.files import ExecutorFiles, OwnDirectories
from nbengine.executor.watch import WorkerReady
from nbengine.ipc.control_messages import Progress
from nbengine.ipc.message_queue import Handle, MessageQueue
from nbengine.scheduler.output import AsyncModelRunnerOutput

logger = logging.getLogger(__name__)

NOBODY = -1
"""Output rank of a call that is not answered. One that fails is the end of its worker, which says so over its line."""
ANSWER_BYTES = 1 << 18
"""Largest answer that goes through shared memory: a step of 256 requests with ten log probabilities each has 60 KB."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker needs to know; the first thing, and the only one, that its executor tells it over the line."""

    config: EngineConfig
    rank: int
    worker_class: str
    """Class of the worker, as "module:Class"."""
    rpc_handle: Handle
    """Of the queue of calls, each a `(method, args, kwargs, output rank)`."""
    files: ExecutorFiles
    own_directories: OwnDirectories
    """Of the executor, whose process may end without removing them; then every worker does."""
    answer_address: str | None = None
    """Where an executor on another machine takes the answers from; None: it is on this one."""

    @property
    def layout(self) -> RankLayout:
        """The worker's place."""
        return RankLayout.of(self.rank, self.config.parallel)


class WorkerProc:
    """Loads the model, then carries out calls in their order.

    Raises:
        Exception: the worker cannot be started; `WorkerReport` tells its executor.
    """

    def __init__(self, spec: WorkerSpec, connection: Connection[Any, Any]) -> None:
        self._rank = spec.rank
        self._connection = connection
        # The loader may report from a thread of its own.
        self._connection_lock = threading.Lock()
        self._progress_rank = spec.rank if spec.config.parallel.world_size > 1 else None
        # What comes next imports torch, which takes seconds.
        self._report_progress(Progress("load", "starting"))
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
        )
        self._async_output_queue: SimpleQueue[tuple[str, Any] | None] = SimpleQueue()
        self._async_output_thread = threading.Thread(
            target=self._async_output_busy_loop, name="nbengine-worker-output", daemon=True
        )

    def start(self) -> None:
        """Say READY, and wait until the executor is at the other ends of both queues."""
        gc.collect()
        # What was loaded stays: the collector need not look at it again in the middle of a step.
        gc.freeze()
        handle = self._worker_response_mq.export_handle()
        self._tell(WorkerReady(handle, self._async_scheduling))
        # However long the others take to load; should the executor end, so does this process.
        self._rpc_broadcast_mq.wait_until_ready()
        self._worker_response_mq.wait_until_ready()
        if self._async_scheduling:
            self._async_output_thread.start()
        logger.info("rank %d takes calls", self._rank)

    def worker_busy_loop(self) -> bool:
        """Carry out calls until the executor shuts the queue down; returns whether all went well."""
        try:
            while self._call(*self._rpc_broadcast_mq.dequeue()):
                pass
        except QueueClosedError:
            return True
        except PeerDiedError as error:
            logger.error("the executor is gone: %s", error)
        except Exception as error:  # noqa: BLE001  # a call is lost, and with it the order of the answers
            self._tell_failure("the queue of calls", error)
        return False

    def shutdown(self) -> None:
        """Finish what is on its way, then free what the worker has."""
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
        """Carry out one call; False after a failure that nobody waits for the answer of."""
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
        # The executor may be why: it is gone then.
        with contextlib.suppress(OSError):
            connection.send(report)
        return 1
    if not worker.worker_busy_loop():
        # The others may be inside an operation that this one takes part in: nothing can be ended in order.
        return 1
    worker.shutdown()
    return 0


def _load_class(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
