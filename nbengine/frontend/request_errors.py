"""What the caller of a request gets that the engine did not finish."""

from __future__ import annotations

from nbengine.errors import RequestError, RequestLostError
from nbengine.ipc.messages import EngineCoreOutput


def error_of(output: EngineCoreOutput, external_req_id: str) -> RequestError:
    """The error of an output with `FinishReason.ERROR`, for the caller of that request alone."""
    reason = output.error or "the engine refused it without a reason"
    message = f"request {external_req_id}: {reason}"
    return RequestError(message) if output.lost_rank is None else RequestLostError(output.lost_rank, message)
