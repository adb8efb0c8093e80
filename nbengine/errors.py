"""The exception tree: everything that nbengine raises on purpose is an `NBEngineError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
        return f"{self.argument} must be {self.allowed}, got {quoted(self.value)}"


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument has a type that is not allowed."""


class ChatTemplateError(InvalidArgumentError):
    """A chat template refuses the messages, in its author's words.

    `complaint` is what the template says, `place` the line where it says so, or an empty string.
    """

    def __init__(self, messages: object, complaint: str, place: str = "") -> None:
        super().__init__("messages", messages, complaint)
        self.args = (messages, complaint, place)
        self.complaint = complaint
        self.place = place

    def __str__(self) -> str:
        where = f", {self.place}" if self.place else ""
        return f"messages are refused by the chat template{where}: {self.complaint}"


class UnknownArgumentError(InvalidTypeError):
    """A call has an unknown keyword argument; the message has the name that was probably meant.

    `allowed` is the text that the message has after the unknown name.
    """

    def __init__(self, function: str, name: str, allowed: str) -> None:
        super().__init__(function, name, allowed)

    @classmethod
    def among(cls, function: str, name: str, known: Iterable[str]) -> UnknownArgumentError:
        """Make the error about the argument `name` of `function`, which takes the `known` ones."""
        names = sorted(known)
        return cls(function, name, did_you_mean(name, names) or f"; there are {', '.join(names)}")

    def __str__(self) -> str:
        return f"{self.argument} has no argument {quoted(self.value)}{self.allowed}"


class NotSupportedError(NBEngineError, NotImplementedError):
    """A documented option that this version does not offer yet; the message names it."""


class ModelNotFoundError(NBEngineError, ValueError):
    """No model has the given name: it is neither an alias nor a path, and the hub does not have it."""


class ModelLoadError(NBEngineError):
    """A model's files are missing, truncated, corrupt or of an unknown kind."""


class RequestError(NBEngineError, ValueError):
    """The engine refused one request; every other request goes on."""


class RefusedArgumentError(RequestError):
    """The engine refused a request for one of its arguments, which `argument` names."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(argument, message)
        self.argument = argument
        self.message = message

    def __str__(self) -> str:
        return self.message


class RequestAbortedError(RequestError):
    """A request was ended before its result, by somebody else or by the engine."""


class EngineUnavailableError(RequestError):
    """The engine takes no requests at present: it is kept asleep, or shuts down. This request may be sent again."""


class RequestLostError(RequestError):
    """The engine core that had a request has ended, and the request cannot go on elsewhere; other requests
    do.

    Requests without output are sent to another engine core instead, unless they were meant for this one
    alone.
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


class ProtocolMismatchError(WireError):
    """Another process, or a file, is of a version of nbengine that this one does not understand."""

    def __init__(self, message: str, theirs: int) -> None:
        super().__init__(message, theirs)
        self.message = message
        self.theirs = theirs
        """Number of the protocol that the other process or file uses; see `nbengine.ipc.protocol`."""

    def __str__(self) -> str:
        return self.message


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


class EngineStalledError(NBEngineError, TimeoutError):
    """The engine runs and did not answer in time; the message says what it is doing, if that is known."""


class LeaseExpiredError(NBEngineError):
    """The host saw no heartbeat from this client in time and dropped its requests."""


class UnenforcedSchemaWarning(UserWarning):
    """A JSON schema has rules that no grammar can keep: the answer has to be checked for them."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean X?"` for the nearest of `known`, an empty string if none is near."""
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def shown(value: object, limit: int = 200) -> str:
    """Write `value` on one line of a message: as it is, or quoted and cut if it is long or unprintable."""
    text = str(value)
    return text if text.isprintable() and 0 < len(text) <= limit else quoted(text, limit)


def quoted(value: object, limit: int = 120) -> str:
    """Write `value` as Python does, cut short."""
    try:
        # repr() of the whole would cost time and memory to show a little of it.
        text = repr(value[: limit + 1] if isinstance(value, str | bytes | list | tuple) else value)
    except (ValueError, RecursionError):
        # The value is an integer of thousands of digits, or is nested too deep.
        return f"a value of type {type(value).__name__} that is too large to be shown"
    return text if len(text) <= limit else text[: limit - 1] + "…"
