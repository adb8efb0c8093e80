"""The errors that callers get for requests that the engine did not finish."""

from __future__ import annotations

from nbengine.errors import (
    EngineUnavailableError,
    RefusedArgumentError,
    RequestAbortedError,
    RequestError,
    RequestLostError,
)
from nbengine.ipc.messages import EngineCoreOutput, FinishReason


def error_of(output: EngineCoreOutput, external_req_id: str) -> RequestError:
    """Make the error of an output that brings no result, for that request's caller alone: the engine refused
    or aborted it."""
    reason = output.error or "the engine gave no reason"
    if output.finish_reason is FinishReason.ABORT:
        return RequestAbortedError(f"request {external_req_id}: it was aborted: {reason}")
    message = f"request {external_req_id}: {reason}"
    if output.lost_rank is not None:
        return RequestLostError(output.lost_rank, message)
    if output.argument is not None:
        return RefusedArgumentError(output.argument, message)
    return EngineUnavailableError(message) if output.is_unavailable else RequestError(message)
