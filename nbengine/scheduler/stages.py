"""How requests are shared out among the steps that a pipeline of stages has in flight.

A request whose token is in flight cannot be planned. If one step took all that can be, there would be nothing to plan
for the stages that it has not reached or has left; so each step leaves their part to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.request import Request

_planned_step = attrgetter("planned_step")


class PipelineShares:
    """What a step takes where `num_stages` of them are in flight. A request alone is in every step it can be in.

    Only requests that get a token count: a chunk of a prompt leaves its request free for the next step, and the
    chunks of one prompt follow each other through the stages.
    """

    def __init__(self, num_stages: int, chunk_limit: int) -> None:
        """`chunk_limit` is the most tokens of one request in a step."""
        self._num_stages = num_stages
        self._chunk_limit = chunk_limit

    def in_turn(self, running: Iterable[Request], num_running: int) -> Iterable[Request]:
        """The running requests that the next step may take, in their order.

        Of those that would get a token, an equal share, the ones that have been in no step for the longest time.
        """
        limit = self._chunk_limit
        due = [
            request for request in running if 0 < request.num_tokens - request.num_computed_tokens <= limit
        ]
        share = self._share(num_running)
        if len(due) <= share:
            return running
        left_out = set(sorted(due, key=_planned_step)[share:])
        return (request for request in running if request not in left_out)

    def most_due(self, plan: SchedulerOutput, num_running: int, num_admissible: int) -> int:
        """How many requests may get a token in a step to which waiting requests are being admitted.

        An equal share of those that run or could, but always one more than are in the plan by then: else requests
        that run could keep the others out for as long as they run.
        """
        return max(self._share(num_running + num_admissible), num_due(plan) + 1)

    def _share(self, count: int) -> int:
        return -(-count // self._num_stages)


def num_due(plan: SchedulerOutput) -> int:
    """How many requests get a token in a step."""
    return len(plan.num_scheduled_tokens) - len(plan.incomplete_req_ids)


def announce_tokens(plan: SchedulerOutput, requests: Mapping[str, Request]) -> None:
    """Write into a plan what the stages that do not sample have yet to be told of its requests."""
    new_token_ids = plan.scheduled_cached_reqs.new_token_ids
    for request_id in plan.num_scheduled_tokens:
        request = requests[request_id]
        request.planned_step = plan.step
        num_announced = request.num_announced_tokens
        if num_announced < request.num_tokens:
            new_token_ids[request_id] = request.all_token_ids[num_announced:]
            request.num_announced_tokens = request.num_tokens
