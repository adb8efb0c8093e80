"""EngineCoreProc: an EngineCore in a separate process, between an input queue and an output queue."""

from __future__ import annotations

import enum
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from nbengine.config import EngineConfig
from nbengine.engine.core.activity import Activity
from nbengine.engine.core.core import EngineCore
from nbengine.engine.core.input_thread import InputThread
from nbengine.engine.core.output_thread import OutputThread
from nbengine.engine.core.request_lanes import RequestLanes
from nbengine.engine.core.work import (
    COORDINATOR_INDEX,
    AbortRequests,
    AddRequest,
    ExecutorFailed,
    GiveUpClient,
    InputItem,
    InputQueue,
    OutputQueue,
    ThreadFailed,
    Wakeup,
    failure,
    refusal,
)
from nbengine.engine.start_log import StartLog
from nbengine.errors import EngineUnavailableError, NBEngineError, RequestError
from nbengine.executor.base import Executor
from nbengine.ipc.control_messages import (
    DetachClient,
    EngineHandshakeMetadata,
    Progress,
    ShutdownEngine,
    WantEvents,
    WorkerPulse,
)
from nbengine.ipc.handshake import encode_control
from nbengine.ipc.messages import ENGINE_CORE_DEAD, EngineCoreOutputs, UtilityOutput, UtilityRequest
from nbengine.ipc.peer_log import PeerLog
from nbengine.metrics.stats import SchedulerStats
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.logs import describe_exception

if TYPE_CHECKING:
    from types import FrameType

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.05
"""Most seconds between two reports of an engine core that is busy, unless the number of its requests changes."""
METER_INTERVAL = 0.1
"""Least seconds between two reports of what requests have taken, while there are unfinished requests."""
TRACE_INTERVAL = 0.05
"""Seconds between two batches of the trace while the engine core is busy."""
REQUESTS_A_STEP = 1024
"""Most requests and calls that are taken in before a step; the rest waits in the clients' lanes."""


class EngineShutdownState(enum.Enum):
    """The stages of an engine core's end."""

    RUNNING = 0
    REQUESTED = 1
    SHUTTING_DOWN = 2


class EngineCoreProc(EngineCore):
    """An engine core with the busy loop on the main thread, and an input and an output thread beside it.

    Raises:
        NBEngineError: the engine cannot be started; see `EngineCore`.
    """

    stats_interval = STATS_INTERVAL

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        rank: int,
        context: zmq.Context[zmq.Socket[bytes]],
        control: zmq.Socket[bytes],
        handshake: EngineHandshakeMetadata,
        files: ExecutorFiles | None = None,
        activity: Activity | None = None,
    ) -> None:
        self._control = control
        self._control_lock = threading.Lock()
        self._start_log = StartLog()
        self._activity = activity or Activity()
        self._activity.workers = self._worker_pulses
        super().__init__(config, executor_class, self._send_progress, engine_index=rank, files=files)
        self._activity.step_number = self._step_number
        self._incarnation = handshake.incarnation
        self.shutdown_state = EngineShutdownState.RUNNING
        self.terminated = False
        """True if SIGTERM has asked for the end."""
        self._drain = False
        self._requeue = False
        self._stats_are_stale = True
        self._stats_due = self._trace_due = 0.0
        self._told_load = (0, 0)
        self._meter_due = 0.0
        self.input_queue: InputQueue = SimpleQueue()
        self._lanes = RequestLanes()
        self._peer_log = PeerLog(logger)
        self.output_queue: OutputQueue = SimpleQueue()
        self._output_thread = OutputThread(
            context,
            rank,
            handshake.coordinator_output,
            self.output_queue,
            self.input_queue,
            config.client_backlog_bytes,
            handshake.incarnation,
        )
        self._input_thread = InputThread(
            context,
            control,
            rank,
            self.preprocess_add_request,
            self.input_queue,
            self.aborts_queue,
            self.output_queue,
            self.model_executor.interrupt,
            handshake.tensor_dir,
            handshake.incarnation,
            handshake.coordinator_input if config.lock_step else "",
        )
        self._handlers: dict[type, Callable[..., None]] = {
            AddRequest: self._add,
            AbortRequests: self._abort,
            GiveUpClient: self._give_up_client,
            UtilityRequest: self._call,
            DetachClient: self._detach,
            WantEvents: self._want_events,
            ShutdownEngine: lambda item: self.request_shutdown(drain=item.drain, requeue=item.requeue),
            Wakeup: lambda _: None,
            ThreadFailed: self._fail,
            ExecutorFailed: self._end_with_workers,
        }
        self.model_executor.register_failure_callback(
            lambda error: self.input_queue.put(ExecutorFailed(error))
        )

    def start(self) -> None:
        """Tell the host that this engine core is ready, and start the I/O threads."""
        gc.collect()
        # All that is loaded by now stays: the collector need not look at it again in the middle of a step.
        gc.freeze()
        self._output_thread.start()
        ready = self.ready_message(self.engine_index)
        ready.incarnation = self._incarnation
        # The socket belongs to the input thread as soon as that has started.
        self._control.send(encode_control(ready))
        self._input_thread.start()
        self._start_log.ready()

    # The busy loop.

    def run_busy_loop(self) -> None:
        """Take in messages and step until the end is asked for.

        Raises:
            Exception: a step or an I/O thread failed; the engine is not usable any more.
        """
        while self._handle_shutdown():
            self._process_input_queue()
            self._activity.begin("step")
            self._process_engine_step()
        if self.trace.has_events:
            self._publish_stats(at_rest=True)

    def _process_input_queue(self) -> None:
        """Return when a step is due, having waited for work if there was none."""
        while not (self._lanes or self.has_work()) and self.shutdown_state is EngineShutdownState.RUNNING:
            self._drop_aborts()
            if self.scheduler.requests:
                self._send_outputs(self.scheduler.take_held())
            if self._stats_are_stale or self.trace.has_events or self.scheduler.meter.has_news:
                self._publish_stats(at_rest=True)
            self._activity.begin("idle")
            item = self.input_queue.get()
            self._activity.begin("step")
            self._handle(item)
        # The items that have come in the meantime join the same step, up to a bound: a flood must not keep it
        # waiting.
        num_items = self.input_queue.qsize()
        if self._lanes or num_items > REQUESTS_A_STEP:
            self._sort_into_lanes(num_items)
            for request in self._lanes.take(REQUESTS_A_STEP):
                self._handle(request)
            return
        for _ in range(REQUESTS_A_STEP):
            if self.input_queue.empty():
                return
            # Nobody else takes items out, so there still is one.
            self._handle(self.input_queue.get_nowait())

    def _sort_into_lanes(self, num_items: int) -> None:
        """Put requests and calls into lanes, and handle at once aborts and news of host and threads."""
        for _ in range(num_items):
            item = self.input_queue.get_nowait()
            if isinstance(item, (AddRequest, UtilityRequest)):
                self._lanes.put(item)
            else:
                if isinstance(item, ShutdownEngine) and item.drain:
                    # Requests that came before the end was asked for are to be finished.
                    self._handle_all_in_lanes()
                self._handle(item)

    def _handle_all_in_lanes(self) -> None:
        while self._lanes:
            for request in self._lanes.take(REQUESTS_A_STEP):
                self._handle(request)

    def _drop_aborts(self) -> None:
        """Forget the eager aborts of an idle engine: all of them are in the input queue, too."""
        while not self.aborts_queue.empty():
            self.aborts_queue.get_nowait()

    def _process_engine_step(self) -> None:
        if not self._step() and self.has_work():
            # Leave the interpreter to the other threads instead of spinning.
            time.sleep(0.001)

    def _step(self) -> bool:
        """Step and pass on the outputs; return whether there was anything to compute or to say."""
        outputs, model_executed = self.step_fn()
        self._send_outputs(outputs)
        self.post_step(model_executed)
        return model_executed or bool(outputs)

    def _send_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for item in outputs.items():
            self.output_queue.put(item)

    def post_step(self, model_executed: bool) -> None:
        """Push the statistics, and the events that someone follows, to the coordinator."""
        super().post_step(model_executed)
        self._publish_stats()

    def _publish_stats(self, *, at_rest: bool = False) -> None:
        """Push the statistics, and the events that someone follows.

        While steps follow each other, most reports would be replaced before they are read, so they are made
        each `stats_interval` and when the number of requests changes. The events of the trace gather for
        `TRACE_INTERVAL`, and what requests have taken for `METER_INTERVAL`. All of it is told when nothing more
        is about to happen (`at_rest`).
        """
        now = time.monotonic()
        load = (len(self.scheduler.running), len(self.scheduler.waiting))
        is_due = at_rest or load != self._told_load or not self.scheduler.requests or now >= self._stats_due
        is_traced = at_rest or (self.trace.has_events and now >= self._trace_due)
        # A batch of the trace has the state, too: the last step of all may have had no event.
        self._stats_are_stale = not is_due or (self.trace.is_recording and not is_traced)
        stats = self.step_stats() if is_due or is_traced else None
        if stats is not None and is_due:
            self._stats_due, self._told_load = now + self.stats_interval, load
            told = (
                self._with_requests(stats, now, at_rest=at_rest) if self.scheduler.meter.has_news else stats
            )
            self.output_queue.put((COORDINATOR_INDEX, EngineCoreOutputs(scheduler_stats=told)))
        events = self.kv_events.take_batch(time.time())
        if events is not None:
            self.output_queue.put(events)
        if stats is not None and is_traced:
            self._trace_due = now + TRACE_INTERVAL
            batch = self.trace.take_batch(time.time(), stats, even_if_empty=at_rest)
            if batch is not None:
                self.output_queue.put(batch)

    def _with_requests(self, stats: SchedulerStats, now: float, *, at_rest: bool) -> SchedulerStats:
        """Return the statistics with what requests have taken, if it is time to tell that."""
        # The report that says that the engine core is idle is complete.
        if not (at_rest or now >= self._meter_due or not self.scheduler.requests):
            return stats
        self._meter_due = now + METER_INTERVAL
        return msgspec.structs.replace(stats, requests=self.scheduler.meter.take())

    # Messages.

    def _handle(self, item: InputItem) -> None:
        self._stats_are_stale = True
        self._handlers[type(item)](item)

    def _add(self, item: AddRequest) -> None:
        request = item.request
        if self._requeue:
            self._return(request.client_index, [request.request_id])
            return
        try:
            if self.shutdown_state is not EngineShutdownState.RUNNING:
                raise EngineUnavailableError("the engine is shutting down")
            self.add_request(request, item.wave)
        except RequestError as error:
            self.output_queue.put(refusal(request.client_index, request.request_id, error))

    def _call(self, call: UtilityRequest) -> None:
        self._activity.begin("call", call.method)
        try:
            result = self.call_utility(call.method, call.args)
        except Exception as error:  # noqa: BLE001 (it is the answer)
            self._answer(call, None, error)
        else:
            if isinstance(result, Future):
                result.add_done_callback(lambda done: self._answer_later(call, done))
            else:
                self._answer(call, result)

    def _answer_later(self, call: UtilityRequest, done: Future[Any]) -> None:
        error = done.exception()
        self._answer(call, None if error is not None else done.result(), error)

    def _answer(self, call: UtilityRequest, result: Any, error: BaseException | None = None) -> None:
        answer = UtilityOutput(call.call_id, result=result)
        if error is not None:
            if not isinstance(error, NBEngineError):
                message = "utility call %s failed"
                self._peer_log.warn_of(call.client_index, message, call.method, exc_info=error)
            answer.failure_message = describe_exception(error)
        # Requests that the call has aborted end before the call is answered.
        self._send_unsent_outputs()
        self.output_queue.put((call.client_index, EngineCoreOutputs(utility_output=answer)))

    def _send_unsent_outputs(self) -> None:
        for item in self.take_unsent_outputs():
            self.output_queue.put(item)

    def _give_up_client(self, item: GiveUpClient) -> None:
        request_ids = self.scheduler.abort_client(item.client_index)
        self.transcripts.take_ended(item.reason)
        ends = [failure(request_id, item.reason) for request_id in request_ids]
        self.output_queue.put((item.client_index, EngineCoreOutputs(outputs=ends)))

    def _abort(self, item: AbortRequests) -> None:
        for unbegun in self._lanes.drop(item.client_index, item.request_ids):
            if unbegun.request.transcript is not None:
                # Handled, so that the readers of the transcripts find the request and the way it ended.
                self._handle(unbegun)
        self.abort_for_client(item.client_index, item.request_ids, item.stopped)

    def _detach(self, item: DetachClient) -> None:
        self._abort(AbortRequests(item.client_index, None))
        # The output thread forgets the client behind all that is queued for it.
        self.output_queue.put(item)

    def _want_events(self, item: WantEvents) -> None:
        if item.topic == "kv":
            self.kv_events.record(item.wanted)
            if item.wanted:
                self.output_queue.put(self.kv_events.snapshot(time.time()))
            return
        self.trace.record(item.wanted)
        if item.wanted:
            for message in self.trace.snapshot(time.time(), self.step_stats()):
                self.output_queue.put(message)

    def _fail(self, item: ThreadFailed) -> None:
        raise NBEngineError(f"the {item.thread} thread failed") from item.error

    def _end_with_workers(self, item: ExecutorFailed) -> None:
        raise item.error

    def _send_progress(self, progress: Progress) -> None:
        progress.rank = self.engine_index
        self._activity.load(progress)
        # A loader may report from its own thread.
        with self._control_lock:
            self._start_log(progress)
            self._control.send(encode_control(progress))

    def _step_number(self) -> int:
        """Return the number of the step that the busy loop makes or waits for; safe on any thread."""
        return self.scheduler.step_counter

    def _worker_pulses(self) -> list[WorkerPulse]:
        """Return the workers' counts, none until all workers have started; safe on any thread."""
        # The pulse thread runs while the model is being loaded, when there is no executor yet.
        executor: Executor | None = getattr(self, "model_executor", None)
        return [] if executor is None else executor.worker_pulses()

    # The end.

    def request_shutdown(self, *, drain: bool = False, requeue: bool = False) -> None:
        """Ask for the end, after the running requests (`drain`) or at once. Safe in a signal handler.

        With `requeue` clients get back the requests that have not begun, for other engine cores.
        """
        self._drain, self._requeue = drain, requeue
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.wake()

    def wake(self) -> None:
        """End the busy loop's wait, so that it looks for work. Safe on any thread and in a signal handler."""
        # A signal handler may interrupt another put, which `SimpleQueue` allows and `Queue` does not.
        self.input_queue.put(Wakeup())

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """End at once: the handler of SIGTERM."""
        self.terminated = True
        self.request_shutdown()

    def on_host_gone(self) -> None:
        """Tell the clients that this is the end, then end; called on the lifeline's thread."""
        # The busy loop may be stuck in a step, so the output thread is told without it.
        self.output_queue.put(ENGINE_CORE_DEAD)
        self.request_shutdown()

    def _handle_shutdown(self) -> bool:
        if self.shutdown_state is EngineShutdownState.RUNNING:
            return True
        if self.shutdown_state is EngineShutdownState.REQUESTED:
            self.shutdown_state = EngineShutdownState.SHUTTING_DOWN
            if self._requeue:
                self._return_unbegun()
        holds = self.control.is_asleep if self._requeue else self.control.holds_requests
        # Requests that are held back would never end by themselves.
        if not self._drain or holds:
            self.abort_all()
            self._send_unsent_outputs()
        return self.scheduler.has_unfinished_requests()

    def _return_unbegun(self) -> None:
        for client_index, request_ids in self.scheduler.take_unbegun().items():
            self._return(client_index, request_ids)
        # Clients do not reach this core any more, so nobody else could resume it.
        self.control.resume()

    def _return(self, client_index: int, request_ids: list[str]) -> None:
        self.output_queue.put((client_index, EngineCoreOutputs(returned=request_ids)))

    def stop_io(self) -> None:
        """End the I/O threads; the last message that every client gets is ENGINE_CORE_DEAD."""
        # The input thread ends first, so that none of its refusals comes behind the last message.
        self._input_thread.stop()
        if self._requeue:
            # A client whose outputs were lost would wait for them, so it gets the time that its lease allows.
            self._output_thread.patience = self.config.lease
        self.output_queue.put(ENGINE_CORE_DEAD)
        if self._output_thread.ident is not None:
            self._output_thread.join()
        self._input_thread.connections.close()
