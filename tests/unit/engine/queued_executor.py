"""The model that adds one, with steps in flight, under the test's control."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from typing import Any

from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.process.process_support.fake_executor import FakeExecutor


class LateFuture(Future[Any]):
    """A future whose call, with all before it, is carried out when someone waits for it, and not before."""

    def __init__(self, calls: deque[tuple[LateFuture, Callable[[], Any]]]) -> None:
        super().__init__()
        self._calls = calls

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            future, call = self._calls.popleft()
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001  # the caller that asks the future gets it
                future.set_exception(error)
        return super().result(timeout)


class QueuedExecutor(FakeExecutor):
    """Carries calls out in their order: `eager` as soon as they are made, otherwise as late as possible.

    `log` has what was carried out: ("execute", step) and ("sample", step).
    """

    async_scheduling = True
    max_concurrent_batches = 2
    eager = False

    def __init__(self, config: Any, progress: Any = None, files: Any = None) -> None:
        super().__init__(config, progress)
        self.calls: deque[tuple[LateFuture, Callable[[], Any]]] = deque()
        self.log: list[tuple[str, int]] = []
        self.plans: list[SchedulerOutput] = []
        self.masks: dict[int, GrammarOutput | None] = {}
        self.num_computed = 0
        self._executed: SchedulerOutput | None = None

    def execute_model(self, scheduler_output: SchedulerOutput, *, non_block: bool = False) -> Any:
        assert non_block
        self.plans.append(scheduler_output)
        return self._call(lambda: self._execute(scheduler_output))

    def sample_tokens(self, grammar_output: GrammarOutput | None = None, *, non_block: bool = False) -> Any:
        assert non_block
        return self._call(lambda: self._sample(grammar_output))

    def _call(self, call: Callable[[], Any]) -> LateFuture:
        future = LateFuture(self.calls)
        self.calls.append((future, call))
        if self.eager:
            self._settle(future)
        return future

    @staticmethod
    def _settle(future: LateFuture) -> None:
        try:
            future.result()
        except Exception:  # noqa: BLE001  # the caller that asks the future gets it
            return

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        assert self._executed is None, "a step is executed before the one before it was sampled"
        self.log.append(("execute", plan.step))
        self.num_computed += plan.total_num_scheduled_tokens
        if not plan.total_num_scheduled_tokens:
            return self.run(plan)
        self._executed = plan
        return None

    def _sample(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        plan, self._executed = self._executed, None
        assert plan is not None
        self.log.append(("sample", plan.step))
        self.masks[plan.step] = grammar_output
        return self.run(plan)


class EagerExecutor(QueuedExecutor):
    eager = True


class ThreeStepExecutor(QueuedExecutor):
    max_concurrent_batches = 3


class PipelineExecutor(QueuedExecutor):
    """As with pipeline parallelism: several steps in flight, but no step that needs a token in flight."""

    async_scheduling = False
    max_concurrent_batches = 3

    def sample_tokens(self, grammar_output: GrammarOutput | None = None, *, non_block: bool = False) -> Any:
        return super().sample_tokens(deepcopy(grammar_output), non_block=non_block)
