"""This module finds an engine's requests that are this process's own, and ends them through a client."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from nbengine.errors import NBEngineError
from nbengine.metrics.history import MetricsHistory
from nbengine.metrics.trace import RequestAdded


class Client(Protocol):
    """The part of a frontend that a dashboard needs."""

    @property
    def client_index(self) -> int:
        """Return the index with which the engine marks the client's requests."""

    @property
    def death(self) -> NBEngineError | None:
        """Say why the client cannot be used any more; None if it can."""

    def abort_soon(self, request_id: str) -> None:
        """End a request, given by its engine request id, on any thread and without waiting.

        Raises:
            NBEngineError: the client cannot; the message says what can.
        """

    def go_on_soon(self) -> None:
        """Wake the engine if it sleeps and lift a pause, on any thread and without waiting.

        Raises:
            NBEngineError: the client cannot.
        """

    def history(self, last: str) -> MetricsHistory:
        """Return what the engine's host has kept of the last time.

        Raises:
            NBEngineError: there is none.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text."""


Words = tuple[str, Sequence[str]]
"""A prompt as it was typed, and the texts of its answers so far."""


class Waiting:
    """The requests that the process waits for, by engine request id; True if the running cell waits."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Mapping[str, bool]]] = []

    def add(self, source: Callable[[], Mapping[str, bool]]) -> None:
        """Ask a source from now on."""
        self._sources.append(source)

    def remove(self, source: Callable[[], Mapping[str, bool]]) -> None:
        """Stop asking a source."""
        self._sources.remove(source)

    def requests(self) -> dict[str, bool]:
        """Collect all requests that are waited for now."""
        found: dict[str, bool] = {}
        for source in self._sources:
            found.update(source())
        return found


class Spoken:
    """The prompts and answers of the requests of the process, by engine request id."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Mapping[str, Words]]] = []

    def add(self, source: Callable[[], Mapping[str, Words]]) -> None:
        """Ask a source from now on."""
        self._sources.append(source)

    def remove(self, source: Callable[[], Mapping[str, Words]]) -> None:
        """Stop asking a source."""
        self._sources.remove(source)

    def words(self) -> dict[str, tuple[str, str]]:
        """Collect each request's prompt and its answer so far; completions of `n > 1` are separate requests."""
        found: dict[str, tuple[str, str]] = {}
        for source in self._sources:
            for request_id, (prompt, texts) in source().items():
                found[request_id] = (prompt, texts[0] if texts else "")
                for index, text in enumerate(texts) if len(texts) > 1 else ():
                    found[f"{index}_{request_id}"] = (prompt, text)
        return found


SPOKEN = Spoken()
"""The prompts and answers of this process, to which the notebook's magics add theirs."""
WAITING = Waiting()
"""The waited-for requests of this process, to which the notebook's magics add theirs."""


class Owner:
    """A client of this process as a dashboard sees it; it keeps neither the client nor its engine alive."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)

    def same_as(self, other: Owner) -> bool:
        """Return whether both owners stand for one client."""
        return self._client() is other._client()

    @property
    def client_index(self) -> int | None:
        """Return the index with which the engine marks the client's requests now; None if the client is gone."""
        client = self._client()
        return None if client is None else client.client_index

    def owns(self, request: RequestAdded) -> bool:
        """Return whether the client has sent a request."""
        return self.client_index == request.client_index

    def abort(self, request: RequestAdded) -> None:
        """End a request of the client; if it has several completions, end only that one.

        Raises:
            NBEngineError: the client cannot.
        """
        client = self._client()
        if client is None:
            raise NBEngineError(f"the client of request {request.request_id} is gone")
        client.abort_soon(request.request_id)

    def go_on(self) -> bool:
        """Let the engine go on; False if the client is gone.

        Raises:
            NBEngineError: the client cannot.
        """
        client = self._client()
        if client is None:
            return False
        client.go_on_soon()
        return True

    def history(self, last: str) -> MetricsHistory | None:
        """Return what the engine's host has kept of the last time; None if the client is gone.

        Raises:
            NBEngineError: there is none.
        """
        client = self._client()
        return None if client is None else client.history(last)

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Decode tokens to text; None if the client is gone."""
        client = self._client()
        return None if client is None else client.decode(token_ids)

    def cause_of_death(self) -> str | None:
        """Say why the engine has ended; None unless the client knows that it has."""
        client = self._client()
        error = None if client is None else client.death
        return None if error is None else str(getattr(error, "cause", error))


def own_requests(
    owners: Sequence[Owner], requests: Iterable[RequestAdded], waited_for: Mapping[str, bool]
) -> dict[str, bool]:
    """Collect the requests that are waited for or were sent by the owners; True if the running cell waits.

    The completions of a request with `n > 1` are separate requests, `{index}_{id}`, and share its answer.
    """
    found = dict(waited_for)
    clients = {owner.client_index for owner in owners}
    for request in requests:
        index, _, parent = request.request_id.partition("_")
        if index.isdecimal() and parent in waited_for:
            found.setdefault(request.request_id, waited_for[parent])
        elif request.client_index in clients:
            found.setdefault(request.request_id, False)
    return found
