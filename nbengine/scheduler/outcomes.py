"""The outcome of a step for each of its requests: tokens, ends, results and faults."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from nbengine.errors import NBEngineError
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, PromptRead
from nbengine.ipc.peer_log import printable
from nbengine.scheduler.faults import describe_fault
from nbengine.scheduler.output import Fault, ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from nbengine.scheduler.state import SchedulerState
from nbengine.scheduler.stop import append_tokens, follow_grammar

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RequestOutcomes(SchedulerState):
    """The part of a scheduler that gives one request what a step has brought it, and makes its output."""

    def _advance(self, request: Request, new_token_ids: list[int]) -> EngineCoreOutput:
        """Append sampled tokens to a request that runs or was preempted since, and end it if they end it."""
        before, error = request.status, None
        new_token_ids = append_tokens(request, new_token_ids)
        grammar = request.grammar
        if grammar is not None:
            if not follow_grammar(request, new_token_ids):
                error = f"structured_outputs: {grammar.error}"
                logger.error("request %s: %s", printable(request.request_id), printable(error))
                # What was refused is no part of the answer.
                new_token_ids = []
            elif grammar.is_over:
                request.grammar = None
                self._structured.pop(request.request_id, None)
        return self._make_output(request, before, new_token_ids, error)

    def _advance_steps(self, request: Request, new_token_ids: list[int]) -> EngineCoreOutput:
        """Append the tokens of several steps that were computed at once."""
        before = request.status
        new_token_ids = append_tokens(request, new_token_ids)
        if before is RequestStatus.RUNNING:
            # The plan has counted the first step.
            request.num_computed_tokens += len(new_token_ids) - 1
            if request.num_computed_tokens >= request.next_cache_point:
                self.kv_cache_manager.cache_blocks(request)
        return self._make_output(request, before, new_token_ids)

    def _count_further_steps(self, answer: ModelRunnerOutput) -> None:
        """Count the steps that have followed a planned one at once."""
        # Not the tokens: requests with a fault have one less.
        further = len(answer.step_ends)
        self.step_counter += further
        self._last_answered_step += further

    def _finish_without_tokens(
        self, request: Request, plan: SchedulerOutput, answer: ModelRunnerOutput, earlier: list[int]
    ) -> EngineCoreOutput | None:
        """End a request that has a fault, perhaps with tokens of earlier steps, or a pooled result; return None if the
        step was not the last for it.

        Raises:
            NBEngineError: the step was to bring a token or a result, and has brought neither.
        """
        request_id = request.request_id
        if answer.faults and request_id in answer.faults:
            return self._fail(request, answer.faults[request_id], earlier)
        pooled = None
        if request.pooling_params is not None and answer.pooler_output is not None:
            pooled = answer.pooler_output.get(request_id)
        if pooled is not None:
            return self._finish_pooling(request, pooled)
        if request_id not in plan.incomplete_req_ids:
            lack = "sampled no token" if request.pooling_params is None else "pooled nothing"
            raise NBEngineError(f"the model runner {lack} for request {request_id}")
        return None

    def _fail(self, request: Request, fault: Fault, earlier: list[int]) -> EngineCoreOutput:
        """End a request for which there is no result, and make its blocks unfindable: they may be damaged."""
        before, new_token_ids = request.status, append_tokens(request, earlier)
        request.status = RequestStatus.FINISHED_ERROR
        error = describe_fault(fault, request)
        logger.error("request %s: %s", request.request_id, error)
        # The blocks are forgotten while they are held: when freed, they would stay findable.
        self.kv_cache_manager.forget(request)
        return self._make_output(request, before, new_token_ids, error)

    def _finish_pooling(self, request: Request, pooled: NDArray[np.float32]) -> EngineCoreOutput:
        before, request.status = request.status, RequestStatus.FINISHED_STOPPED
        output = self._make_output(request, before, [])
        output.pooling_output = pooled
        return output

    def _make_output(
        self, request: Request, before: RequestStatus, new_token_ids: list[int], error: str | None = None
    ) -> EngineCoreOutput:
        """Make the output of a request, and release the request if its status is not `before` any more."""
        finish_reason = None
        events = request.events
        # A first token has events, so that the others cost the meter nothing.
        if events is not None:
            request.events = None
            if new_token_ids and request.num_output_tokens == len(new_token_ids):
                self.meter.first_token(request, self.clock())
        if request.status is not before:
            request.error = error or ""
            finish_reason = FINISH_REASONS[request.status]
            self._release(request, before)
            self.meter.ended(request, self.clock())
        elif request.num_computed_tokens >= request.next_cache_point:
            self.kv_cache_manager.cache_blocks(request)
        return EngineCoreOutput(
            request.request_id,
            new_token_ids,
            finish_reason,
            request.stop_reason,
            events,
            request.num_cached_tokens,
            error,
        )

    def take_held(self) -> dict[int, EngineCoreOutputs]:
        """Return by client index the outputs that are held: no step is to follow that would tell them."""
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        self._tell_held(outputs, self.requests)
        return self._by_client(outputs, self.clock())

    def _tell_held(
        self, outputs: defaultdict[int, list[EngineCoreOutput]], request_ids: Iterable[str]
    ) -> None:
        """Add to the outputs what is held of some requests: they may not run soon."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and request.held_output is not None:
                outputs[request.client_index].append(request.held_output)
                request.held_output = None

    def _by_client(
        self, outputs: Mapping[int, list[EngineCoreOutput]], timestamp: float
    ) -> dict[int, EngineCoreOutputs]:
        return {
            client: EngineCoreOutputs(self.engine_index, client_outputs, timestamp=timestamp)
            for client, client_outputs in outputs.items()
        }

    def _take_drafts(self, draft_token_ids: dict[str, list[int]], step: int) -> None:
        for request_id, drafts in draft_token_ids.items():
            request = self.requests.get(request_id)
            if (
                request is not None
                and request.status is RequestStatus.RUNNING
                and request.grammar is None
                and step >= request.first_step
                # Drafts come behind the last known token, so that one must be next.
                and request.num_computed_tokens == request.num_tokens - 1
            ):
                request.spec_token_ids = drafts[: self.num_lookahead_tokens]

    def _tell_prompts_read(
        self, by_client: dict[int, EngineCoreOutputs], plan: SchedulerOutput, timestamp: float
    ) -> None:
        """Tell the clients how much has been read of the prompts that a step has not completed."""
        for request_id in plan.incomplete_req_ids:
            request = self.requests.get(request_id)
            if request is None or plan.step < request.first_step or request.num_output_tokens:
                continue
            request.num_read_tokens += plan.num_scheduled_tokens[request_id]
            # One that was preempted since has lost what was read.
            if request.status is not RequestStatus.RUNNING or request.pooling_params is not None:
                continue
            outputs = by_client.setdefault(
                request.client_index, EngineCoreOutputs(self.engine_index, timestamp=timestamp)
            )
            if outputs.prompts_read is None:
                outputs.prompts_read = []
            outputs.prompts_read.append(
                PromptRead(
                    request_id,
                    request.num_prompt_tokens,
                    request.num_read_tokens,
                    request.num_cached_tokens,
                    timestamp - request.scheduled_at,
                )
            )

    def _tell_ended(self, by_client: dict[int, EngineCoreOutputs], timestamp: float) -> None:
        for client, request_ids in self._ended_by_client.items():
            outputs = by_client.setdefault(client, EngineCoreOutputs(self.engine_index, timestamp=timestamp))
            outputs.finished_requests = request_ids
        self._ended_by_client.clear()
