"""A lane per client for requests and calls that wait while there are more than one step takes in. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from nbengine.engine.core.work import AddRequest
from nbengine.ipc.messages import UtilityRequest

LaneItem = AddRequest | UtilityRequest
_Key = str | tuple[str, int] | int


class RequestLanes:
    """The requests and calls that are not handled yet: each client's in order, the clients in turn.

    A client that asks for a hundred thousand requests in one go makes itself wait, and nobody else.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[int, OrderedDict[_Key, LaneItem]] = OrderedDict()
        """The lanes by client, beginning with the client whose turn it is."""
        self._num_put = 0

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def put(self, item: LaneItem) -> None:
        """Add an item behind the others of its client."""
        self._num_put += 1
        key: _Key = self._num_put
        client_index = item.request.client_index if isinstance(item, AddRequest) else item.client_index
        lane = self._lanes.setdefault(client_index, OrderedDict())
        if isinstance(item, AddRequest):
            key = item.request.request_id
            if key in lane:
                # The second request of an id will be refused; an abort of the id is for the first.
                key = key, self._num_put
        lane[key] = item

    def take(self, most: int) -> Iterator[LaneItem]:
        """Take out at most `most` items, one of each client in turn."""
        lanes = self._lanes
        for _ in range(most):
            if not lanes:
                return
            client_index, lane = next(iter(lanes.items()))
            _, item = lane.popitem(last=False)
            if lane:
                lanes.move_to_end(client_index)
            else:
                del lanes[client_index]
            yield item

    def drop(self, client_index: int, request_ids: list[str] | None) -> list[AddRequest]:
        """Take out aborted requests of a client, with None all its items; return the requests among them."""
        lane = self._lanes.get(client_index)
        if lane is None:
            return []
        if request_ids is None:
            found = list(lane.values())
            lane.clear()
        else:
            found = [lane.pop(request_id) for request_id in request_ids if request_id in lane]
        if not lane:
            del self._lanes[client_index]
        return [item for item in found if isinstance(item, AddRequest)]
