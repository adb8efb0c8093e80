"""The place of an engine in copies of answers: data can be copied and pickled, a connection cannot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nbengine.errors import NBEngineError

LOST = "it is a copy, without the engine that has answered; ask again, or branch from the answer itself"
"""The reason why a copy of an answer cannot go on."""


@dataclass(frozen=True)
class LostClient:
    """A client that has no connection, in the place of the one that the engine called `name` had."""

    name: str = ""

    @property
    def engine_ranks(self) -> Sequence[int]:
        """Return no ranks: there is no engine."""
        return ()

    stall = None

    def stats_within(self, timeout: float) -> NoReturn:
        """Refuse to tell of an engine.

        Raises:
            NBEngineError: always; the message says why.
        """
        del timeout
        raise _refusal()

    def place_within(self, request_ids: Sequence[str], timeout: float) -> NoReturn:
        """Refuse to tell of a queue.

        Raises:
            NBEngineError: always; the message says why.
        """
        del request_ids, timeout
        raise _refusal()

    @property
    def control(self) -> NoReturn:
        """Refuse to control an engine.

        Raises:
            NBEngineError: always; the message says why.
        """
        raise _refusal()

    def submit(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a request.

        Raises:
            NBEngineError: always; the message says why.
        """
        raise _refusal()

    def read_transcripts(self, request_ids: Iterable[str]) -> None:
        """Tell nobody."""

    def abort_soon(self, request_id: str) -> None:
        """End nothing: no request of this copy runs."""


def _refusal() -> NBEngineError:
    return NBEngineError(f"this answer cannot go on: {LOST}")
