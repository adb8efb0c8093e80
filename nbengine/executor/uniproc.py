"""One worker, in the process of its engine core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from nbengine.config import EngineConfig
from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.executor.base import Executor
from nbengine.models.progress import ProgressCallback
from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from nbengine.worker.worker import Worker

T = TypeVar("T")


class UniProcExecutor(Executor):
    """Calls its worker directly: a call is done when it returns, so that no timeout ever passes."""

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        self._worker: Worker | None = Worker(config, progress)
        try:
            self._worker.init_device()
            self._worker.load_model()
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
    ) -> Any:
        function = None if method.startswith("_") else getattr(self._alive(), method, None)
        if not callable(function):
            raise NBEngineError(f"workers have no method {method!r}")

        def call() -> list[Any]:
            return [function(*args, **(kwargs or {}))]

        return _completed(call) if non_block else call()

    def execute_model(self, scheduler_output: SchedulerOutput, *, non_block: bool = False) -> Any:
        worker = self._alive()
        if non_block:
            return _completed(lambda: worker.execute_model(scheduler_output))
        return worker.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput:
        return self._alive().sample_tokens(grammar_output)

    def check_health(self) -> None:
        self._alive()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    def _alive(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("the executor has been shut down")
        return self._worker


def _completed(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001  # whoever asks the future gets it
        future.set_exception(error)
    return future
