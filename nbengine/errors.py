"""The exception tree: everything that nbengine raises on purpose is an `NBEngineError`."""

from __future__ import annotations


class NBEngineError(Exception):
    """Base of everything that nbengine raises on purpose."""


class InvalidArgumentError(NBEngineError, ValueError):
    """An argument has a value that is not allowed.

    The message names the argument, its value and what is allowed.
    """

    def __init__(self, argument: str, value: object, allowed: str) -> None:
        super().__init__(argument, value, allowed)
        self.argument = argument
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.argument} must be {self.allowed}, got {_short(self.value)}"


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument has a type that is not allowed."""


class NotSupportedError(NBEngineError, NotImplementedError):
    """A documented option that this version does not offer yet; the message names it."""


class ModelNotFoundError(NBEngineError, ValueError):
    """No model goes by that name: not an alias, not a path, not found on the hub."""


class ModelLoadError(NBEngineError):
    """A model's files are missing, truncated, corrupt or of an unknown kind."""


class RequestError(NBEngineError, ValueError):
    """The engine refused one request; every other request goes on."""


class RequestLostError(RequestError):
    """The engine core that had a request has ended, and the request cannot go on elsewhere; every other request does.

    Requests that had no output yet are sent to another engine core instead, unless they were meant for this one alone.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, message)
        self.rank = rank
        self.message = message

    def __str__(self) -> str:
        return self.message


class IncompleteOutputError(NBEngineError, ValueError):
    """A structured output was cut off, so that it has no value."""


class UtilityError(NBEngineError):
    """A utility call failed inside the engine; the message carries the engine's error."""


class WireError(NBEngineError):
    """A message between processes cannot be encoded, or what came cannot be decoded."""


class QueueClosedError(NBEngineError):
    """This end of a message queue has shut down, or the other end has and there is nothing left to read."""


class QueueTimeoutError(NBEngineError, TimeoutError):
    """A message queue did not get ready, or a message did not come or find room, within the time allowed."""


class PeerDiedError(NBEngineError):
    """A process at another end of a message queue has ended without shutting down; the message names it."""


class EngineEndError(NBEngineError):
    """An engine ended, or never started; `log_tail` holds its last log lines, root cause last."""

    def __init__(self, cause: str, log_tail: str = "") -> None:
        super().__init__(cause, log_tail)
        self.cause = cause
        self.log_tail = log_tail

    def __str__(self) -> str:
        # The log often ends with the cause.
        lines = [line for line in self.log_tail.splitlines() if self.cause not in line]
        if not any(lines):
            return self.cause
        return "\n".join(["last lines of the engine's log:", *lines, "", self.cause])


class EngineStartError(EngineEndError):
    """The engine did not start."""


class EngineDeadError(EngineEndError):
    """The engine ended while it was needed."""


class LeaseExpiredError(NBEngineError):
    """The host saw no heartbeat from this client in time and dropped its requests."""


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
