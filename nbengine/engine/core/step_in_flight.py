"""A step between its plan and its outcome."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from nbengine.errors import NBEngineError
from nbengine.scheduler.output import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput


@dataclass(slots=True)
class StepInFlight:
    """A plan that has been given to the executor, and its outcome when that is there."""

    plan: SchedulerOutput
    executed: Future[ModelRunnerOutput | None]
    sampled: Future[ModelRunnerOutput | AsyncModelRunnerOutput] | None = None
    """None while sampling waits for masks, and for a plan without tokens."""

    @classmethod
    def of_blank(cls, plan: SchedulerOutput) -> StepInFlight:
        """Make a step that is over at once, from a plan that says nothing that workers need to know."""
        executed: Future[ModelRunnerOutput | None] = Future()
        executed.set_result(ModelRunnerOutput(req_ids=[], sampled_token_ids=[]))
        return cls(plan, executed)

    @property
    def awaits_sampling(self) -> bool:
        """Tell whether the executor has yet to be told to sample."""
        return self.sampled is None and self.plan.total_num_scheduled_tokens > 0

    @property
    def is_done(self) -> bool:
        """Tell whether `result` returns without waiting."""
        if self.sampled is None:
            return self.executed.done()
        if not self.sampled.done():
            return False
        try:
            output = self.sampled.result()
        except Exception:  # noqa: BLE001  # `result` raises it
            return True
        return not isinstance(output, AsyncModelRunnerOutput) or output.is_ready

    def result(self) -> ModelRunnerOutput:
        """Wait for the end of the step and return its outcome; raise the error if it failed."""
        output: ModelRunnerOutput | AsyncModelRunnerOutput | None = self.executed.result()
        if self.sampled is not None:
            output = self.sampled.result()
        if isinstance(output, AsyncModelRunnerOutput):
            return output.get_output()
        if output is None:
            raise NBEngineError(f"step {self.plan.step} has no output")
        return output


def describe_step(scheduler_output: SchedulerOutput) -> str:
    """Describe a step's plan in one line: numbers and the first request ids, no contents."""
    scheduled = scheduler_output.num_scheduled_tokens
    first = ", ".join(f"{request_id}: {count}" for request_id, count in list(scheduled.items())[:8])
    more = f", and {len(scheduled) - 8} more" if len(scheduled) > 8 else ""
    return (
        f"{scheduler_output.step} ({scheduler_output.total_num_scheduled_tokens} tokens of {len(scheduled)} "
        f"requests: {first}{more})"
    )
