"""The phases of steps: which of them read prompts, and which compute again what a preemption has thrown away."""

from __future__ import annotations

from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.request import Request, RequestStatus


class StepPhases:
    """Counts the steps that do more than decode, when they are answered.

    A request reads from its admission until a step computes the last token that it has. A step in which no request
    reads costs a look at two empty dicts.
    """

    __slots__ = ("in_flight", "num_prefill_steps", "num_recompute_steps", "reading")

    def __init__(self) -> None:
        self.reading: dict[str, Request] = {}
        """The requests that read, by id; some may have ended or been preempted meanwhile."""
        self.num_prefill_steps = 0
        """Steps since the start in which a request read its prompt for the first time, and none read again."""
        self.num_recompute_steps = 0
        """Steps since the start in which a request read again after a preemption."""
        self.in_flight: dict[int, bool] = {}
        """The steps in flight in which a request reads, and whether one reads again."""

    def planned(self, plan: SchedulerOutput) -> None:
        """Note a plan, before the next one is made."""
        reads = again = False
        still: dict[str, Request] = {}
        for request_id, request in self.reading.items():
            if request.status is not RequestStatus.RUNNING:
                continue
            if request_id in plan.num_scheduled_tokens:
                reads = True
                again = again or request.num_preemptions > 0
                if request_id not in plan.incomplete_req_ids:
                    continue
            still[request_id] = request
        self.reading = still
        if reads:
            self.in_flight[plan.step] = again

    def answered(self, step: int) -> None:
        """Count a step whose outputs have come, if a request read in it."""
        again = self.in_flight.pop(step, None)
        if again is not None:
            self.num_recompute_steps += again
            self.num_prefill_steps += not again
