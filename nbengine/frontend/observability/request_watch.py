"""The records of a frontend's requests, which observers get when the requests have ended."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from nbengine.ipc.messages import EngineCoreRequest
from nbengine.outputs import RequestMetrics
from nbengine.sampling_params import PoolingParams, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestRecord:
    """The record of a request that has ended, as its frontend knows it."""

    request_id: str
    """The caller's id."""
    engine_request_id: str
    prompt: str | None
    """The text; None where the caller gave tokens or embeddings."""
    num_prompt_tokens: int
    params: SamplingParams | PoolingParams
    metrics: RequestMetrics
    trace_headers: Mapping[str, str] | None = None
    """The headers with which the request came, for its place in somebody's trace."""
    num_cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    """The reason of each completion, in the order of their ends."""
    error: str | None = None
    """The reason why the request has no result; its completions may have begun."""


class RequestObserver(Protocol):
    """An observer of requests, called on the thread that processes outputs: it must not wait."""

    def ended(self, record: RequestRecord) -> None:
        """Take note of a request that has ended."""


class RequestWatch:
    """The observers, and the records of unfinished requests that began while there were any.

    Without observers nothing is recorded. An observer that fails is logged, and the others are told.
    """

    def __init__(self) -> None:
        self.observers: list[RequestObserver] = []
        self._records: dict[Hashable, RequestRecord] = {}

    def begin(
        self,
        key: Hashable,
        request: EngineCoreRequest,
        params: SamplingParams | PoolingParams,
        prompt: str | None,
        metrics: RequestMetrics,
        trace_headers: Mapping[str, str] | None,
    ) -> None:
        """Begin the record of a request, all its completions together, under a `key` that no other has."""
        if not self.observers:
            return
        token_ids = request.prompt_token_ids
        self._records[key] = RequestRecord(
            request.external_req_id or request.request_id,
            request.request_id,
            prompt,
            len(request.prompt_embeds if token_ids is None else token_ids),
            params,
            metrics,
            trace_headers,
        )

    def completed(self, key: Hashable, reason: str, num_cached_tokens: int, *, is_last: bool) -> None:
        """Note the end of a completion; with the last one the request has ended."""
        record = self._records.get(key)
        if record is None:
            return
        record.finish_reasons.append(reason)
        record.num_cached_tokens = max(record.num_cached_tokens, num_cached_tokens)
        if is_last:
            self._tell(key)

    def failed(self, key: Hashable, error: Exception, now: float) -> None:
        """Note that a request has ended with an error, at `now` of `time.monotonic()`."""
        record = self._records.get(key)
        if record is not None:
            record.error = str(error)
            record.metrics.finished_time = now
            self._tell(key)

    def forget(self, key: Hashable) -> None:
        """Drop the record of a request that was never sent."""
        self._records.pop(key, None)

    def _tell(self, key: Hashable) -> None:
        record = self._records.pop(key)
        for observer in list(self.observers):
            try:
                observer.ended(record)
            except Exception:
                logger.exception("an observer of requests failed at request %r", record.request_id)
