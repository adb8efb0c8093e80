"""The queue of the requests that run, in scheduling order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from nbengine.errors import NBEngineError
from nbengine.scheduler.request import Request

_order = attrgetter("order")


class RequestQueue:
    """Requests sorted by `request.order`, which is unique.

    Appending in order and taking the last are cheap; any other insertion or removal moves one
    pointer for each request behind it.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order; `pop_last` is allowed during the iteration."""
        # A list's iterator goes by the index, so a list that gets shorter only ends it earlier.
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Insert a request at its place."""
        requests = self._requests
        if not requests or requests[-1].order < request.order:
            requests.append(request)
        else:
            requests.insert(bisect_left(requests, request.order, key=_order), request)

    def pop_last(self) -> Request:
        """Remove and return the last request."""
        return self._requests.pop()

    def remove(self, request: Request) -> None:
        """Remove a request.

        Raises:
            NBEngineError: it is not in the queue.
        """
        index = bisect_left(self._requests, request.order, key=_order)
        if index == len(self._requests) or self._requests[index] is not request:
            raise NBEngineError(f"request {request.request_id} is not in the queue")
        del self._requests[index]
