"""The client of an engine core in this process:
it has no sockets and no threads, and each `get_output` is a step."""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any

from nbengine.client.calls import merged_answers
from nbengine.config import EngineConfig
from nbengine.errors import (
    EngineDeadError,
    EngineEndError,
    NBEngineError,
    NotSupportedError,
    RequestError,
    UtilityError,
)
from nbengine.ipc.control_messages import EngineReady, HistoryPage, ReadHistory
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from nbengine.ipc.refusals import refused
from nbengine.runtime.logs import describe_exception
from nbengine.runtime.progress import ProgressCallback


class InprocClient:
    """The client of an `EngineCore` that it owns, for one thread.

    Its constructor loads the model (and torch).
    """

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        from nbengine.engine.core.core import EngineCore
        from nbengine.executor.choice import executor_class

        self.config = config
        self.engine_core = EngineCore(config, executor_class(config), progress)
        self._refused: list[EngineCoreOutput] = []
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._dead: EngineDeadError | None = None

    def wait_ready(self, progress: ProgressCallback | None = None) -> EngineReady:
        """Return at once: the constructor has loaded everything."""
        del progress
        return self.engine_core.ready_message(0)

    def get_output(self, on_quiet: Callable[[], object] | None = None) -> EngineCoreOutputs:
        """Run one step and return its outputs.

        An interrupt takes effect after the step: between scheduling and taking in the result it would leave
        scheduler and model in different states.

        Raises:
            EngineDeadError: the step failed, or the engine was shut down.
            NBEngineError: the engine is paused or sleeps, so that no output can come.
        """
        del on_quiet
        self.check_alive()
        if self._refused:
            refused, self._refused = self._refused, []
            return EngineCoreOutputs(outputs=refused)
        if self._outputs:
            return self._outputs.popleft()
        if not self.engine_core.has_work() and self.engine_core.control.holds_requests:
            raise NBEngineError("the engine is paused or sleeps: resume_generation() or wake_up() first")
        return self._step()

    def _step(self) -> EngineCoreOutputs:
        try:
            with _interrupt_deferred():
                outputs, model_executed = self.engine_core.step_fn()
                self.engine_core.post_step(model_executed)
        except Exception as error:
            tail = error.log_tail if isinstance(error, EngineEndError) else ""
            death = EngineDeadError(f"the engine failed: {describe_exception(error)}", tail)
            self._end(copy.copy(death))
            raise death from error
        return outputs.get(0) or EngineCoreOutputs()

    @property
    def connection(self) -> None:
        """Return None: no other process can attach."""

    @property
    def client_index(self) -> int:
        """Return 0, the number of an engine's only client."""
        return 0

    @property
    def death(self) -> EngineDeadError | None:
        """Return the error that says why the engine has ended, None while it has not."""
        return self._dead

    @property
    def stall(self) -> None:
        """Return None: nothing waits for an engine that stands but the caller."""

    @property
    def engine_ranks(self) -> list[int]:
        """Return the rank of the one engine core."""
        return [0]

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; a refusal comes as an output, as from an engine in another process."""
        self.check_alive()
        try:
            prepared, wave = self.engine_core.preprocess_add_request(request)
            self.engine_core.add_request(prepared, wave)
        except RequestError as error:
            self._refused.append(refused(request.request_id, error, str(error)))

    def abort_requests(self, request_ids: Iterable[str], *, stopped: Collection[str] = ()) -> None:
        """Drop requests; unknown ids are ignored."""
        self.engine_core.abort_requests(list(request_ids), stopped)

    def submit_utility(self, method: str, *args: Any) -> Future[Any]:
        """Call a utility method; the future is done when this returns."""
        future: Future[Any] = Future()
        try:
            self.check_alive()
            result = self.engine_core.call_utility(method, list(args))
            if isinstance(result, Future):
                while not result.done():
                    self._outputs.append(self._step())
                result = result.result()
            self._outputs.extend(outputs for _, outputs in self.engine_core.take_unsent_outputs())
            future.set_result(merged_answers(method, [result]))
        except NBEngineError as error:
            future.set_exception(error)
        except Exception as error:  # noqa: BLE001 (it reaches the caller, as it does from another process)
            future.set_exception(UtilityError(f"{method}: {type(error).__name__}: {error}"))
        return future

    def call_within(self, timeout: float, method: str, *args: Any) -> tuple[Any, list[int]]:
        """Make a utility call, however long it takes."""
        del timeout
        return self.submit_utility(method, *args).result(), []

    def ask_health(self) -> list[Future[Any]]:
        """Have the worker compute something; the future is done when this returns."""
        return [self.submit_utility("check_health")]

    def describe_silence(self, missing: Sequence[Future[Any]]) -> str:
        """Name the engine, whose answers never come late."""
        del missing
        return "the engine"

    def submit_scale(self, data_parallel_size: int) -> Future[int]:
        """Refuse to scale: an engine in this process has one engine core."""
        future: Future[int] = Future()
        error = NotSupportedError(
            f"data_parallel_size={data_parallel_size}: an engine in this process (multiprocess=False) has one engine core"
        )
        future.set_exception(error)
        return future

    def submit_history(self, asked: ReadHistory) -> Future[HistoryPage]:
        """Refuse: the host of an engine keeps the history, and an engine in this process has none."""
        del asked
        future: Future[HistoryPage] = Future()
        future.set_exception(
            NotSupportedError("an engine in this process keeps no history; leave multiprocess=False out")
        )
        return future

    def check_alive(self) -> None:
        """Raise `EngineDeadError` after `shutdown`."""
        if self._dead is not None:
            raise copy.copy(self._dead)

    def abandon(self) -> None:
        """Release the model."""
        self.shutdown()

    def release(self) -> None:
        """Release the model."""
        self.shutdown()

    def shutdown(self, *, drain: bool = False) -> None:
        """Release the model, with `drain` after its requests have finished; another call does nothing."""
        while drain and self._dead is None and self.engine_core.has_work():
            self.get_output()
        self._end(EngineDeadError("the engine was shut down"))

    def _end(self, reason: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = reason
            self.engine_core.shutdown()


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            previous(*pending[0])
