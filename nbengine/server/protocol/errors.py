"""The error that a route answers with."""

from __future__ import annotations

from typing import Any

from nbengine.errors import (
    EngineEndError,
    EngineStalledError,
    EngineUnavailableError,
    InvalidArgumentError,
    LeaseExpiredError,
    NBEngineError,
    NotSupportedError,
    RefusedArgumentError,
    RequestAbortedError,
    RequestError,
    RequestLostError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
_TOO_LONG = ("prompt", "max_model_len")
"""The arguments that an error names when a prompt has no room in the model's context."""
_RETRY_SECONDS = 1


class ApiError(NBEngineError):
    """A request cannot be answered; `status` is HTTP's, the other fields are those of OpenAI's error object.

    `retry_after` is the number of seconds after which the same request may be answered, None if that is not
    known.
    """

    def __init__(
        self,
        status: int,
        type: str,
        code: str | None,
        param: str | None,
        message: str,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(status, type, code, param, message)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.message = message
        self.retry_after = retry_after

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object, as the body of an answer or the data of an event."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the same error in the form of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else INVALID_REQUEST)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the error."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the error of a request that cannot be answered as it is."""
    return ApiError(400, INVALID_REQUEST, code, param, message)


def unavailable(message: str, code: str, retry_after: int | None = _RETRY_SECONDS) -> ApiError:
    """Make the error of a request that could be answered at another time."""
    return ApiError(503, "service_unavailable_error", code, None, message, retry_after)


def api_error_of(error: BaseException) -> ApiError:
    """Return the error that a caller gets for an exception: his own faults with their reason, and nothing of
    the server's inside for a fault that nobody has foreseen."""
    match error:
        case ApiError():
            return error
        case InvalidArgumentError():
            code = "context_length_exceeded" if _is_too_long(error) else "invalid_value"
            return bad_request(str(error), _param_of(error.argument), code)
        case NotSupportedError():
            return bad_request(str(error), None, "unsupported_value")
        case RequestLostError():
            return ApiError(500, SERVER_ERROR, "request_lost", None, str(error))
        case RefusedArgumentError():
            return bad_request(str(error), _param_of(error.argument), "invalid_value")
        case RequestAbortedError():
            return unavailable(str(error), "request_aborted")
        case EngineUnavailableError():
            return unavailable(str(error), "engine_unavailable")
        case RequestError():
            return bad_request(str(error), None, "invalid_value")
        case EngineEndError():
            # The log's last lines are for the operator.
            return unavailable(f"the engine has ended: {error.cause}", "engine_dead", None)
        case LeaseExpiredError() | EngineStalledError():
            return unavailable(str(error), "engine_unreachable")
        case NBEngineError():
            return ApiError(500, SERVER_ERROR, None, None, str(error))
        case RecursionError():
            return bad_request("the body is nested too deeply", None, "invalid_json")
        case _:
            return ApiError(500, SERVER_ERROR, "internal_error", None, "the server failed; its log says why")


def _is_too_long(error: InvalidArgumentError) -> bool:
    return error.argument in _TOO_LONG and "tokens long" in error.allowed


def _param_of(argument: str) -> str:
    """Return the field that an argument comes from: `messages[0].role` for `messages[0]['role']`."""
    return argument.replace("['", ".").replace("']", "")
