"""A request as the scheduler sees it."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Sequence
from typing import Any

from nbengine.errors import RequestError
from nbengine.ipc.merged_output import merge, own_copy
from nbengine.ipc.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TranscriptMark,
)
from nbengine.kv_cache.prefix import BlockHasher, ExtraKeys
from nbengine.kv_cache.state_pool import NO_SLOT
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.grammar import Grammar


class RequestStatus(enum.Enum):
    """The status of a request."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    """The request waits again, after it lost its blocks."""
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}
"""The finished statuses, and the reason that the client is told for each."""


Order = tuple[int, int, float, int]
"""Priority, turn (of a request that has been admitted: see `WaitingQueue`), arrival time, number: lower goes
first."""


class Request:
    """Tokens, progress and blocks of one request.

    A pooling request has `pooling_params` and no `sampling_params`, and ends when its prompt is computed.
    `num_computed_tokens` counts the tokens whose keys and values are computed or planned; it catches up with
    `num_tokens`, which grows by what is sampled, and passes it while sampled tokens are in flight. The
    scheduler fills in `number`, `queued_at`, `order` and `max_total_tokens` when it takes the request; the KV
    cache manager owns the fields from `block_ids` on.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "client_index",
        "content_digests",
        "due_step",
        "eos_token_id",
        "error",
        "events",
        "extra_keys",
        "first_step",
        "first_token_at",
        "fork",
        "grammar",
        "has_stop_string",
        "held_output",
        "is_plain",
        "last_step",
        "made_states",
        "max_total_tokens",
        "min_total_tokens",
        "next_cache_point",
        "num_announced_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_passed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_read_tokens",
        "num_slots",
        "num_tokens",
        "number",
        "order",
        "output_interval",
        "pooling_params",
        "priority",
        "prompt_embeds",
        "prompt_token_ids",
        "queued_at",
        "received_at",
        "request_id",
        "sampling_params",
        "scheduled_at",
        "skip_reading_prefix_cache",
        "spec_token_ids",
        "state_slot",
        "state_source",
        "status",
        "stop_reason",
        "stop_token_ids",
        "tell_at",
        "transcript",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams | None,
        *,
        pooling_params: PoolingParams | None = None,
        client_index: int = 0,
        priority: int = 0,
        arrival_time: float = 0.0,
        extra_keys: ExtraKeys = (),
        block_hasher: BlockHasher | None = None,
        prompt_embeds: Any = None,
        content_digests: Sequence[bytes] = (),
        transcript: TranscriptMark | None = None,
        received_at: float = math.nan,
        output_interval: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.client_index = client_index
        self.priority = priority
        self.arrival_time = arrival_time
        self.order: Order = (0, 0, 0.0, 0)
        self.number = -1
        """Position in the order in which the scheduler has taken its requests, from 0."""
        self.received_at = received_at
        """Time on the scheduler's clock when the request was read; nan until the scheduler takes one of which that
        is not known."""
        self.queued_at = self.scheduled_at = self.first_token_at = 0.0
        """Times on the scheduler's clock; `scheduled_at` is that of the first admission."""
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.error = ""
        """The text that the client gets of one that has ended with an error."""
        self.has_stop_string = False
        """True if its client has found a stop string in the output, and ends it for that."""
        self.events: list[EngineCoreEvent] | None = None
        self.held_output: EngineCoreOutput | None = None
        """The tokens that its client has not been told."""
        self.output_interval = output_interval
        """Seconds for which tokens may be held."""
        self.tell_at = 0.0
        """Time on the scheduler's clock from which nothing is held."""
        self.transcript = transcript
        """The mark of a request whose transcript is kept: such a request goes to
        `SchedulerState.ended_for_transcripts` when it has ended."""

        self.prompt_embeds = prompt_embeds
        """The embeddings, for the workers, of a prompt that was given as such; its `prompt_token_ids` are
        zeros."""
        self.prompt_token_ids = prompt_token_ids
        self.all_token_ids = prompt_token_ids.copy()
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_read_tokens = 0
        """Tokens whose keys and values the steps that were answered have left, while the prompt is incomplete."""
        self.spec_token_ids: list[int] = []
        """Drafts to be verified in the next step."""
        # No step's outcome is for a request that was not admitted.
        self.first_step = sys.maxsize
        """The step of the first admission."""
        self.num_preemptions = 0
        self.last_step = -1
        """For a preempted request: the last step in which it may have been planned."""
        self.due_step = -1
        """With pipeline parallelism: the last step in which it got a token."""
        self.num_announced_tokens = self.num_prompt_tokens
        """With pipeline parallelism: the number of tokens that the stages which do not sample have been
        told."""
        self.num_cached_tokens = -1
        """Tokens found in the prefix cache at the first admission; -1 before it."""

        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.eos_token_id: int | None = None
        self.stop_token_ids: set[int] = set()
        self.min_total_tokens = self.num_prompt_tokens
        self.max_total_tokens = 0
        self.grammar: Grammar | None = None
        """With structured outputs: the grammar that the output must follow."""
        self.is_plain = sampling_params is not None and sampling_params.is_plain
        self.skip_reading_prefix_cache = pooling_params is not None and pooling_params.needs_every_token
        if sampling_params is not None:
            self._set_limits(sampling_params)

        self.block_ids: list[int] = []
        self.num_slots = 0
        """Tokens up to which the request need not ask for room."""
        self.num_cached_blocks = 0
        """Leading blocks of each table that have been offered to the prefix cache."""
        self.next_cache_point = 0
        self.num_passed: list[int] = []
        self.state_slot = self.state_source = NO_SLOT
        self.made_states: list[tuple[int, int, int]] = []
        self.fork = 0
        self.extra_keys = extra_keys
        self.content_digests = content_digests
        self.block_hashes: list[bytes] = []
        if block_hasher is not None:
            block_hasher.extend(self.block_hashes, prompt_token_ids, extra_keys, content_digests)

    @classmethod
    def from_engine_core_request(
        cls,
        request: EngineCoreRequest,
        block_hasher: BlockHasher | None,
        embeds_bytes: memoryview | None = None,
        received_at: float = math.nan,
    ) -> Request:
        """Build from the wire form, and hash the prompt's blocks when there is a hasher.

        `embeds_bytes` holds a prompt given as embeddings, the same number of bytes for each token;
        `received_at` is a time on the scheduler's clock.

        Raises:
            RequestError: the request is of a kind that the scheduler does not take.
        """
        if (request.sampling_params is None) == (request.pooling_params is None):
            raise RequestError(
                f"request {request.request_id}: either sampling_params or pooling_params must be given"
            )
        token_ids, digests = request.prompt_token_ids, []
        if token_ids is None:
            if embeds_bytes is None:
                raise RequestError(f"request {request.request_id}: neither tokens nor embeddings are given")
            token_ids = [0] * len(request.prompt_embeds)
            if block_hasher is not None:
                digests = block_hasher.digests(embeds_bytes, len(token_ids))
        salt = request.cache_salt
        return cls(
            request.request_id,
            token_ids,
            request.sampling_params,
            pooling_params=request.pooling_params,
            client_index=request.client_index,
            priority=request.priority,
            arrival_time=request.arrival_time,
            extra_keys=() if salt is None else (("cache_salt", salt),),
            block_hasher=block_hasher,
            prompt_embeds=request.prompt_embeds,
            content_digests=digests,
            transcript=request.transcript,
            received_at=received_at,
            output_interval=request.output_interval,
        )

    def _set_limits(self, params: SamplingParams) -> None:
        self.eos_token_id = None if params.ignore_eos else params.eos_token_id
        self.stop_token_ids.update(params.stop_token_ids)
        if self.eos_token_id is not None:
            self.stop_token_ids.add(self.eos_token_id)
        self.min_total_tokens += params.min_tokens
        # Prompt logprobs need the logits of every prompt token, so every one must be computed.
        self.skip_reading_prefix_cache = params.prompt_logprobs is not None

    @property
    def num_output_placeholders(self) -> int:
        """Count the output tokens in flight, planned and not known yet; 0 for a preempted request."""
        # When the last known token is planned, the one behind it is in flight.
        return max(0, self.num_computed_tokens - self.num_tokens + 1)

    @property
    def num_output_tokens(self) -> int:
        """Count the tokens sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Return a copy of the tokens sampled so far."""
        return self.all_token_ids[self.num_prompt_tokens :]

    def told(self, output: EngineCoreOutput, now: float) -> EngineCoreOutput | None:
        """Return what the client is told when a step has this outcome; None: it is held.

        Each message takes time of two processes, which is then missing where steps are computed.
        """
        if not self.output_interval:
            return output
        if now < self.tell_at and output.finish_reason is None and output.events is None:
            self.held_output = self.with_held(output)
            return None
        # Requests of one interval are told in the same steps.
        self.tell_at = (now // self.output_interval + 1) * self.output_interval
        told, self.held_output = self.with_held(output), None
        return told

    def with_held(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Return an output together with what is held."""
        if self.held_output is None:
            return own_copy(output)
        merge(self.held_output, output)
        return self.held_output

    def record_event(self, kind: EngineCoreEventType, timestamp: float) -> None:
        """Note an event, which the request's next output carries."""
        event = EngineCoreEvent(kind, timestamp)
        if self.events is None:
            self.events = [event]
        else:
            self.events.append(event)
