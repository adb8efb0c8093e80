"""A log of requests: one line for each, when it has ended, without what was asked unless that is wanted."""

from __future__ import annotations

import logging

from nbengine.frontend.observability.request_watch import RequestRecord
from nbengine.ipc.peer_log import printable
from nbengine.sampling_params import PoolingParams

logger = logging.getLogger(__name__)


class RequestLog:
    """An observer that logs requests at level INFO.

    Args:
        prompts: log the prompts, too; they may be private, and stay in the log.
        max_chars: the most characters of a prompt.
    """

    def __init__(self, *, prompts: bool = False, max_chars: int = 200) -> None:
        self._prompts = prompts
        self._max_chars = max_chars

    def ended(self, record: RequestRecord) -> None:
        """Log a request that has ended."""
        logger.info("%s", self.line(record))

    def line(self, record: RequestRecord) -> str:
        """Return the line about a request."""
        metrics = record.metrics
        cached = f" ({record.num_cached_tokens:,} cached)" if record.num_cached_tokens else ""
        end = f"failed: {printable(record.error)}" if record.error is not None else _reasons(record)
        parts = [
            f"{record.num_prompt_tokens:,} prompt tokens{cached}",
            *_asked_and_made(record),
            end,
            *_times(record),
        ]
        if metrics.num_preemptions:
            parts.append(f"preempted {metrics.num_preemptions} times")
        if self._prompts and record.prompt is not None:
            text = record.prompt[: self._max_chars]
            more = f" and {len(record.prompt) - len(text):,} characters" if text != record.prompt else ""
            parts.append(f"prompt {text!r}{more}")
        return f"request {printable(record.request_id)}: " + ", ".join(parts)


def _asked_and_made(record: RequestRecord) -> list[str]:
    params = record.params
    if isinstance(params, PoolingParams):
        return [f"task {params.task}"]
    made = f"{record.metrics.num_generation_tokens:,} tokens"
    return [made, f"temperature={params.temperature:g} max_tokens={params.max_tokens}"]


def _reasons(record: RequestRecord) -> str:
    reasons = record.finish_reasons
    kinds = dict.fromkeys(reasons)
    if len(reasons) == 1:
        return reasons[0]
    return " and ".join(f"{reasons.count(kind)} {kind}" for kind in kinds)


def _times(record: RequestRecord) -> list[str]:
    metrics = record.metrics
    found = []
    if metrics.queued_time is not None:
        found.append(f"waited {metrics.queued_time:.3f} s")
    if metrics.time_to_first_token is not None:
        found.append(f"first token after {metrics.time_to_first_token:.3f} s")
    if metrics.finished_time is not None:
        found.append(f"{metrics.finished_time - metrics.arrival_time:.3f} s in all")
    return found
