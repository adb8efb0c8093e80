"""The output with which an engine core refuses a request."""

from __future__ import annotations

from nbengine.errors import EngineUnavailableError, RefusedArgumentError
from nbengine.ipc.messages import EngineCoreOutput, FinishReason


def refused(request_id: str, error: BaseException, reason: str) -> EngineCoreOutput:
    """Return the output that tells a request's caller of an error; `reason` is what it says."""
    return EngineCoreOutput(
        request_id,
        [],
        finish_reason=FinishReason.ERROR,
        error=reason,
        argument=error.argument if isinstance(error, RefusedArgumentError) else None,
        is_unavailable=isinstance(error, EngineUnavailableError),
    )
