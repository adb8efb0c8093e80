"""The protocol of an engine under measurement, and the messages that its process gets and sends.

An engine's process may run in an environment of its own that has neither torch nor nbengine: this module
imports only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of one batch of prompts, from the call until every prompt has its first token, and until
    every prompt has all of its tokens."""

    first: float
    total: float


@dataclass(frozen=True, slots=True)
class Job:
    """A job for the process of an engine: it loads the model, runs the batch and answers.

    The batch runs `warmups` times without being counted, then `repeats` times.
    """

    model: str
    """The path of a GGUF file."""
    threads: int
    prompts: list[list[int]]
    new_tokens: int
    warmups: int = 1
    repeats: int = 3
    kv_tokens: int = 8192
    """Tokens for which the engine has to have room, in all requests together."""
    logits_from: int | None = None
    """In place of timing: write the logits of the positions from this one on to `logits_path`."""
    logits_path: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    """Further arguments of nbengine's engine."""
    wants_memory: bool = False
    """The engine's memory is read again and again while it runs, which takes a little of its time."""

    @property
    def most_streams(self) -> int:
        """Return the number of requests that run at once."""
        return len(self.prompts)

    @property
    def most_tokens(self) -> int:
        """Return the length of the longest request, its new tokens included."""
        return max(map(len, self.prompts)) + self.new_tokens

    def encode(self) -> str:
        """Render as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Job:
        """Read what `encode` gave."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Answer:
    """The findings of the process of an engine."""

    version: str
    timings: list[Timing] = field(default_factory=list)
    """One for each counted run."""
    first_token_at: float = 0.0
    """The time of the first token of the first run, by `time.monotonic()`, which all processes share."""
    memory: dict[str, Any] = field(default_factory=dict)
    """See `peers.memory.resident`: of all the engine's processes, the last time before the run ended; {} where it was
    not asked for."""

    def encode(self) -> str:
        """Render as JSON in one line."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Answer:
        """Read what `encode` gave."""
        fields = json.loads(text)
        return cls(**{**fields, "timings": [Timing(**timing) for timing in fields["timings"]]})


class Engine(Protocol):
    """A loaded model that generates greedily."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Generate exactly `new_tokens` tokens for each prompt, all at once, from an empty cache."""

    def logits(self, prompts: list[list[int]], first: int) -> Any:
        """Return float32 [prompts, length - first, vocabulary]: the logits that follow each position from
        `first` on. All prompts have the same length."""

    def pids(self) -> list[int]:
        """List the processes that the engine consists of, this one included."""

    def close(self) -> None:
        """End everything that was started."""


Load = Callable[[Job], Engine]
"""The function `load` of an engine's module; it has to raise ImportError where the engine is not installed."""
