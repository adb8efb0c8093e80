"""Requests that wait, in the order in which they are to be admitted: clients take turns."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge

from nbengine.errors import NBEngineError
from nbengine.scheduler.request import Order, Request, RequestStatus

_Lines = OrderedDict[int, "_Line"]
"""The lines by client, beginning with the client whose turn it is."""


class WaitingQueue:
    """Requests by priority; within one priority a request of each client in turn, each client's own in their
    order.

    A client stands behind all others when it begins to wait, and again whenever one of its requests is
    admitted: while a request is the first of its client, each other client has at most one admitted before
    it. The client's own requests have the order of `Request.order`.

    A request that has been admitted has a place among all that ever were (`Request.order`: its `turn` grows
    whenever a request of another client is admitted). It keeps that place when it is preempted, and then goes
    before every request that would come behind it.

    An operation costs O(log n), with n requests that wait, and O(1) if the requests come in order.
    """

    def __init__(self) -> None:
        self._begun = _Line()
        """The preempted requests."""
        self._priorities: list[int] = []
        """Priorities of the requests that have not begun, sorted."""
        self._lines: dict[int, _Lines] = {}
        """Lines of the requests that have not begun, by priority."""
        self._num_requests = 0
        self._turn = 0
        self._newest_client: int | None = None
        """The client whose request was admitted last."""

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order of admission; nothing may be added or removed during the iteration."""
        begun = iter(self._begun)
        resumed = next(begun, None)
        turn, newest = self._turn, self._newest_client
        for priority in self._priorities:
            ring = deque((client, iter(line)) for client, line in self._lines[priority].items())
            while ring:
                client, line = ring.popleft()
                request = next(line, None)
                if request is None:
                    continue
                # Turns are counted as `admit` would.
                turn += client != newest
                newest = client
                place = _with_turn(request.order, turn)
                while resumed is not None and resumed.order < place:
                    yield resumed
                    resumed = next(begun, None)
                yield request
                ring.append((client, line))
        if resumed is not None:
            yield resumed
            yield from begun

    @property
    def num_begun(self) -> int:
        """Count the requests that have been preempted."""
        return len(self._begun)

    def first(self, *, only_begun: bool = False) -> Request | None:
        """Return the request that is to be admitted next; with `only_begun`, the next that was preempted."""
        resumed = self._begun.first()
        if only_begun or not self._priorities:
            return resumed
        # There are no empty lines: `remove` deletes a line with its last request.
        line = next(iter(self._lines[self._priorities[0]].values()))
        request = line.first()
        if resumed is None or request is None:
            return request
        return resumed if resumed.order < self._place_of(request) else request

    def add(self, request: Request) -> None:
        """Add a request; one that was preempted has its `order` already."""
        self._num_requests += 1
        if request.status is RequestStatus.PREEMPTED:
            self._begun.add(request)
            return
        priority = request.order[0]
        lines = self._lines.get(priority)
        if lines is None:
            lines = self._lines[priority] = OrderedDict()
            insort(self._priorities, priority)
        line = lines.get(request.client_index)
        if line is None:
            line = lines[request.client_index] = _Line()
        line.add(request)

    def admit(self, request: Request) -> None:
        """Take out the `first` request, and give it its place among those that run."""
        begins = request.status is not RequestStatus.PREEMPTED
        if begins:
            order = self._place_of(request)
            self._turn, self._newest_client = order[1], request.client_index
        self.remove(request)
        if begins:
            lines = self._lines.get(request.order[0])
            if lines is not None and request.client_index in lines:
                lines.move_to_end(request.client_index)
            request.order = order

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands.

        Raises:
            NBEngineError: it is not in the queue.
        """
        if self._begun.discard(request):
            self._num_requests -= 1
            return
        priority = request.order[0]
        lines = self._lines.get(priority)
        line = None if lines is None else lines.get(request.client_index)
        if lines is None or line is None or not line.discard(request):
            raise NBEngineError(f"request {request.request_id} is not in the queue")
        self._num_requests -= 1
        if not line:
            del lines[request.client_index]
        if not lines:
            del self._lines[priority]
            del self._priorities[bisect_left(self._priorities, priority)]

    def _place_of(self, request: Request) -> Order:
        """Return the order that a request would have if it were admitted now."""
        return _with_turn(request.order, self._turn + (request.client_index != self._newest_client))


class _Line:
    """Requests sorted by `order`, which is unique. Those that have left stay in its lists until they come
    up."""

    __slots__ = ("_in_order", "_late", "_members")

    def __init__(self) -> None:
        self._in_order: deque[Request] = deque()
        """Requests that came with a greater order than the one before them, as nearly all do."""
        self._late: list[tuple[Order, Request]] = []
        """The other requests, as a heap."""
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order, at a cost that grows with what is asked for."""
        members = self._members
        if not self._late:
            return (request for request in self._in_order if request in members)
        in_order = ((request.order, request) for request in self._in_order)
        both = merge(in_order, _sorted(self._late))
        return (request for _, request in both if request in members)

    def first(self) -> Request | None:
        in_order, late, members = self._in_order, self._late, self._members
        while in_order and in_order[0] not in members:
            in_order.popleft()
        while late and late[0][1] not in members:
            heappop(late)
        if not late:
            return in_order[0] if in_order else None
        return in_order[0] if in_order and in_order[0].order < late[0][0] else late[0][1]

    def add(self, request: Request) -> None:
        in_order = self._in_order
        self._members.add(request)
        if not in_order or in_order[-1].order < request.order:
            in_order.append(request)
        else:
            heappush(self._late, (request.order, request))

    def discard(self, request: Request) -> bool:
        """Take a request out, and return whether it was there."""
        in_order, late, members = self._in_order, self._late, self._members
        if request not in members:
            return False
        members.remove(request)
        if in_order and in_order[0] is request:
            in_order.popleft()
        elif late and late[0][1] is request:
            heappop(late)
        elif len(in_order) + len(late) > 2 * len(members):
            # Most entries have left: without them, the lists stay in proportion to the requests.
            self._in_order = deque(other for other in in_order if other in members)
            self._late = [entry for entry in late if entry[1] in members]
            heapify(self._late)
        return True


def _sorted(heap: list[tuple[Order, Request]]) -> Iterator[tuple[Order, Request]]:
    """Yield the entries of a heap in order, without taking them out."""
    frontier = [(heap[0], 0)]
    while frontier:
        entry, index = heappop(frontier)
        yield entry
        for child in (2 * index + 1, 2 * index + 2):
            if child < len(heap):
                heappush(frontier, (heap[child], child))


def _with_turn(order: Order, turn: int) -> Order:
    priority, _, arrival, number = order
    return priority, turn, arrival, number
