"""Which of an engine's requests are this process's own, and how they are ended: what a dashboard asks a client for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from nbengine.errors import NBEngineError
from nbengine.metrics.trace import RequestAdded


class Client(Protocol):
    """The part of a frontend that a dashboard needs."""

    @property
    def client_index(self) -> int:
        """By which the engine knows its requests."""

    @property
    def death(self) -> NBEngineError | None:
        """Why it cannot be used any more, if so."""

    def abort_soon(self, request_id: str) -> None:
        """End a request, given by its engine request id, on any thread and without waiting.

        Raises:
            NBEngineError: it cannot; the message says what can.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""


class Waiting:
    """What the process waits for: whether the running cell does, by engine request id."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Mapping[str, bool]]] = []

    def add(self, source: Callable[[], Mapping[str, bool]]) -> None:
        """Ask this from now on."""
        self._sources.append(source)

    def remove(self, source: Callable[[], Mapping[str, bool]]) -> None:
        """Ask this no more."""
        self._sources.remove(source)

    def requests(self) -> dict[str, bool]:
        """All that is waited for now."""
        found: dict[str, bool] = {}
        for source in self._sources:
            found.update(source())
        return found


WAITING = Waiting()
"""Of this process: the notebook's magics add theirs."""


class Owner:
    """A client of this process as a dashboard sees it; it keeps neither the client nor its engine alive."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)

    def same_as(self, other: Owner) -> bool:
        """Whether both stand for one client."""
        return self._client() is other._client()

    def owns(self, request: RequestAdded) -> bool:
        """Whether the client has sent it."""
        client = self._client()
        return client is not None and client.client_index == request.client_index

    def abort(self, request: RequestAdded) -> None:
        """End a request of the client's: one completion where it is one of several.

        Raises:
            NBEngineError: the client cannot.
        """
        client = self._client()
        if client is None:
            raise NBEngineError(f"the client of request {request.request_id} is gone")
        client.abort_soon(request.request_id)

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """The text of tokens; None if the client is gone."""
        client = self._client()
        return None if client is None else client.decode(token_ids)

    def cause_of_death(self) -> str | None:
        """Why the engine has ended, if the client knows that it has."""
        client = self._client()
        error = None if client is None else client.death
        return None if error is None else str(getattr(error, "cause", error))


def own_requests(
    owners: Sequence[Owner], requests: Iterable[RequestAdded], waited_for: Mapping[str, bool]
) -> dict[str, bool]:
    """What is waited for, and of these requests those of the owners: whether the running cell waits for it.

    The completions of a request with `n > 1` are requests of their own, `{index}_{id}`, and share its answer.
    """
    found = dict(waited_for)
    for request in requests:
        index, _, parent = request.request_id.partition("_")
        if index.isdecimal() and parent in waited_for:
            found.setdefault(request.request_id, waited_for[parent])
        elif any(owner.owns(request) for owner in owners):
            found.setdefault(request.request_id, False)
    return found
