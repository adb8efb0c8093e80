"""The conversations that `%%chat` keeps: they are text and outlive the engines that wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import InvalidArgumentError, NBEngineError, did_you_mean
from nbengine.magics.generation.result import GenerationResult, ShownOnce
from nbengine.magics.namespace import running_cell

DEFAULT_NAME = "default"
_FORMAT = "nbengine-conversation"
_VERSION = 2
_READABLE = (1, 2)
"""The versions of files that can be read: turns had no rounds of calls in the first."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """One execution of a notebook's cell."""

    cell_id: str
    run_id: str

    @classmethod
    def current(cls, shell: InteractiveShell) -> CellRun | None:
        """Return the run that is being executed; None in a terminal, or if the frontend names no cell."""
        cell_id, run_id = running_cell(shell)
        return cls(cell_id, run_id) if cell_id and run_id else None


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """A call of a tool with its result, as the model reads it; `arguments` is the JSON text of an object.

    `failed` says that the result is an error, or the reason why nobody carried the call out.
    """

    id: str
    name: str
    arguments: str
    result: str
    failed: bool = False
    seconds: float | None = None
    """The seconds that it took; None if it was not carried out."""


@dataclass(frozen=True, slots=True)
class Round:
    """A model's calls of tools before it answers, with the text and the reasoning before them."""

    text: str
    reasoning: str
    calls: tuple[CarriedOut, ...]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the model's message and the results of its calls."""
        calls = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        results = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": call.result}
            for call in self.calls
        ]
        return [_answer_message(self.text, self.reasoning) | {"tool_calls": calls}, *results]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn of a conversation: the user's message and the model's answer, with `reasoning` apart.

    `finish_reason` is "stop", "length", "abort" for an answer that was interrupted, or "tool_calls" for one that
    ended because the model had called its tools often enough. `rounds` are the calls before the answer.
    """

    user: str
    text: str
    reasoning: str = ""
    finish_reason: str | None = "stop"
    cell: CellRun | None = field(default=None, compare=False)
    rounds: tuple[Round, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Return whether the answer lacks its end because it was stopped."""
        return self.finish_reason == "abort"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the user's message, those of the rounds, and the answer; reasoning is a separate field, which a
        chat template uses or ignores."""
        return [*begun_turn(self.user, self.rounds), _answer_message(self.text, self.reasoning)]


def begun_turn(user: str, rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Return the messages of a turn before its answer."""
    return [{"role": "user", "content": user}, *(message for each in rounds for message in each.messages)]


def _answer_message(text: str, reasoning: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return message | {"reasoning_content": reasoning} if reasoning else message


class Conversation(ShownOnce):
    """A conversation with a model, which grows by a turn with each `%%chat`.

    `text` and `reasoning` are those of the last answer, and `last` is its `GenerationResult` with token ids,
    log probabilities and metrics. `str(conversation)` is the text, and so is `{conversation}` in a prompt.
    """

    def __init__(self, name: str = DEFAULT_NAME, system: str | None = None) -> None:
        self.name = name
        self.system = system
        self.last: GenerationResult | None = None
        self._turns: list[Exchange] = []

    @property
    def turns(self) -> tuple[Exchange, ...]:
        """Return the turns, the first one first."""
        return tuple(self._turns)

    @property
    def text(self) -> str:
        """Return the last answer without its reasoning; it is empty before there is one."""
        return self._turns[-1].text if self._turns else ""

    @property
    def reasoning(self) -> str:
        """Return the reasoning of the last answer; it is empty if there is none."""
        return self._turns[-1].reasoning if self._turns else ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return all messages as a chat template takes them, with reasoning in `reasoning_content`."""
        return self.messages_before(len(self._turns), self.system)

    def messages_before(self, position: int, system: str | None) -> list[dict[str, Any]]:
        """Return the messages of the first `position` turns, behind this system message."""
        start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        return start + [message for turn in self._turns[:position] for message in turn.messages]

    def to_openai(self) -> list[dict[str, Any]]:
        """Return all messages as chat services take them: role, content, and calls of tools with their results."""
        fields = ("role", "content", "tool_calls", "tool_call_id")
        return [{key: message[key] for key in fields if key in message} for message in self.messages]

    def position_of(self, cell: CellRun | None) -> int | None:
        """Find the position of the first turn that an earlier run of this cell added; None if none has."""
        if cell is None:
            return None
        for position, turn in enumerate(self._turns):
            if turn.cell is not None and turn.cell.cell_id == cell.cell_id and turn.cell != cell:
                return position
        return None

    def add(self, turn: Exchange, position: int | None = None) -> None:
        """Add a turn at the end, or at `position` in place of all that follow."""
        if position is not None:
            del self._turns[position:]
        self._turns.append(turn)

    def check_undo(self, count: int) -> None:
        """Check that `count` turns can be removed.

        Raises:
            InvalidArgumentError: the conversation has fewer turns.
        """
        if not 1 <= count <= len(self._turns):
            allowed = f"from 1 to {len(self._turns)}, the turns of conversation {self.name!r}"
            raise InvalidArgumentError(
                "undo", count, allowed if self._turns else "left out: there are no turns"
            )

    def undo(self, count: int = 1) -> list[Exchange]:
        """Remove the last `count` turns, and return them.

        Raises:
            InvalidArgumentError: the conversation has fewer turns.
        """
        self.check_undo(count)
        removed = self._turns[-count:]
        del self._turns[-count:]
        self.last = None
        return removed

    def reset(self) -> None:
        """Forget all turns and the system message."""
        self._turns.clear()
        self.system = self.last = None

    def to_dict(self) -> dict[str, Any]:
        """Describe the conversation in plain values, with all that is needed to go on later."""
        turns = [
            {
                "user": turn.user,
                "text": turn.text,
                "reasoning": turn.reasoning,
                "finish_reason": turn.finish_reason,
                "cell": None if turn.cell is None else turn.cell.cell_id,
                "rounds": [asdict(each) for each in turn.rounds],
            }
            for turn in self._turns
        ]
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "name": self.name,
            "system": self.system,
            "turns": turns,
        }

    def save(self, path: str | Path) -> None:
        """Write the conversation to a JSON file.

        Raises:
            NBEngineError: the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
        try:
            # Half of a surrogate pair, as a streamed answer may have at its end, is written as JSON's escape.
            Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))
        except (OSError, ValueError) as error:
            raise NBEngineError(f"cannot write the conversation to {path!r}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Conversation:
        """Read a file that `save` has written.

        Raises:
            NBEngineError: the file cannot be read, or is no conversation.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NBEngineError(f"cannot read a conversation from {path}: {error}") from error
        try:
            return cls.from_dict(content)
        except (KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
            raise NBEngineError(
                f"{path} is no saved conversation: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Conversation:
        """Make the conversation that `to_dict` has described.

        Raises:
            KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError: `content` is not such a
                description.
        """
        if content["format"] != _FORMAT or content["version"] not in _READABLE:
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        conversation = cls(_text(content["name"]), _text_or_none(content["system"]))
        for turn in content["turns"]:
            cell = _text_or_none(turn["cell"])
            exchange = Exchange(
                _text(turn["user"]),
                _text(turn["text"]),
                _text(turn["reasoning"]),
                _text_or_none(turn["finish_reason"]),
                None if cell is None else CellRun(cell, ""),
                tuple(map(_round, turn.get("rounds", ()))),
            )
            conversation.add(exchange)
        return conversation

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from nbengine.magics.conversations.view import conversation_bundle

        del include, exclude
        return {"text/html": conversation_bundle(self)["text/html"]}

    def __len__(self) -> int:
        return len(self._turns)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Conversation({self.name!r}, {len(self)} turn{'' if len(self) == 1 else 's'})"


class Conversations:
    """A notebook's conversations by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Conversation] = {}

    @property
    def names(self) -> list[str]:
        """List the names of the conversations, in the order in which they were begun."""
        return list(self._by_name)

    def open(self, name: str) -> Conversation:
        """Return the conversation of that name, and begin it if there is none."""
        return self._by_name.setdefault(name, Conversation(name))

    def find(self, name: str) -> Conversation:
        """Find the conversation of that name; the default one always exists.

        Raises:
            InvalidArgumentError: there is none; the message lists the conversations.
        """
        if name == DEFAULT_NAME:
            return self.open(name)
        if name not in self._by_name:
            known = ", ".join(map(repr, self._by_name)) or "none has begun yet"
            allowed = f"a conversation of this notebook ({known}{did_you_mean(name, self._by_name)})"
            raise InvalidArgumentError("name", name, allowed)
        return self._by_name[name]

    def put(self, conversation: Conversation, name: str) -> None:
        """Store a conversation under a name, in place of the one that had it."""
        conversation.name = name
        self._by_name[name] = conversation


def _round(content: Mapping[str, Any]) -> Round:
    calls = tuple(msgspec.convert(call, CarriedOut) for call in content["calls"])
    return Round(_text(content["text"]), _text(content["reasoning"]), calls)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)
