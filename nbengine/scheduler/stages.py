"""The sharing of requests among the steps that a pipeline of stages has in flight.

A request whose token is in flight cannot be planned. If one step took all requests that can be planned,
nothing would be left for the stages that it has not reached or has left; so each step leaves a part to the
others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.queue import RequestQueue
from nbengine.scheduler.request import Request

_due_step = attrgetter("due_step")


class PipelineShares:
    """The share of the requests that a step takes, if several steps, one for each stage, are to be in flight.

    Only requests that get a token count: a chunk of a prompt leaves its request free for the next step, and
    the chunks of one prompt follow each other through the stages.
    """

    def __init__(self, num_steps: int, chunk_limit: int) -> None:
        """Share among `num_steps` steps in flight, with at most `chunk_limit` tokens of a request in each."""
        self._num_steps = num_steps
        self._chunk_limit = chunk_limit

    @classmethod
    def of(cls, options: SchedulerOptions, chunk_limit: int) -> PipelineShares | None:
        """Return the shares of a pipeline, None where there is only one stage."""
        num_stages = options.num_stages
        if num_stages == 1:
            return None
        return cls(min(num_stages, options.max_concurrent_steps or num_stages), chunk_limit)

    def in_turn(self, running: RequestQueue, num_in_flight: int) -> Iterable[Request]:
        """Return the running requests that the next step may take, in their order.

        Of those that would get a token it takes a share: first those that have never got one, then those that
        have not for the longest time.
        """
        due = self._due(running)
        share = self._share(len(running), len(due), num_in_flight)
        if len(due) <= share:
            return running
        # Requests that last had their turn in the same step stay in their order, since the sort is stable.
        left_out = set(sorted(due, key=_due_step)[share:])
        return (request for request in running if request not in left_out)

    def most_due(
        self, plan: SchedulerOutput, running: RequestQueue, num_admissible: int, num_in_flight: int
    ) -> int:
        """Return how many requests may get a token in a step to which waiting requests are being admitted.

        This is a share of those that run or could run, but always at least one more than the plan has by
        then: otherwise requests that run could keep the others out for as long as they run.
        """
        planned = num_due(plan)
        num_free = planned + len(self._due(running)) + num_admissible
        return max(self._share(len(running) + num_admissible, num_free, num_in_flight), planned + 1)

    def _due(self, running: RequestQueue) -> list[Request]:
        # A request with more to compute than one chunk gets no token in the next step.
        limit = self._chunk_limit
        return [
            request for request in running if 0 < request.num_tokens - request.num_computed_tokens <= limit
        ]

    def _share(self, num_requests: int, num_free: int, num_in_flight: int) -> int:
        """Divide requests that are in no step among the steps to come, none with more than an equal part."""
        # Both parts are rounded up: while any request is free, no step is left without one.
        num_to_come = max(1, self._num_steps - num_in_flight)
        return min(-(-num_requests // self._num_steps), -(-num_free // num_to_come))


def num_due(plan: SchedulerOutput) -> int:
    """Count the requests that get a token in a step."""
    return len(plan.num_scheduled_tokens) - len(plan.incomplete_req_ids)


def announce_tokens(plan: SchedulerOutput, requests: Mapping[str, Request]) -> None:
    """Write into a plan the tokens of its requests that the stages which do not sample do not know yet.

    Also note which requests have had their turn.
    """
    new_token_ids = plan.scheduled_cached_reqs.new_token_ids
    for request_id in plan.num_scheduled_tokens:
        request = requests[request_id]
        if request_id not in plan.incomplete_req_ids:
            request.due_step = plan.step
        num_announced = request.num_announced_tokens
        if num_announced < request.num_tokens:
            new_token_ids[request_id] = request.all_token_ids[num_announced:]
            request.num_announced_tokens = request.num_tokens
