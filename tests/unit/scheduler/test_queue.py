"""The queue of those that run, against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.errors import NBEngineError
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.queue import RequestQueue
from nbengine.scheduler.request import Order, Request


def make_request(order: Order) -> Request:
    request = Request(f"r{order}", [1], SamplingParams())
    request.order = order
    return request


orders = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(0, 2), st.sampled_from([0.0, 0.5]), st.integers(0, 9)),
    unique=True,
    max_size=15,
)


@given(orders=orders, data=st.data())
def test_requests_come_in_order_whatever_is_added_and_removed(
    orders: list[Order], data: st.DataObject
) -> None:
    queue = RequestQueue()
    requests = [make_request(order) for order in orders]
    for request in requests:
        queue.add(request)
    gone = data.draw(st.lists(st.sampled_from(requests), unique=True)) if requests else []
    for request in gone:
        queue.remove(request)
    left = sorted((r for r in requests if r not in gone), key=lambda r: r.order)
    assert list(queue) == left
    assert len(queue) == len(left)
    if left:
        assert queue.pop_last() is left[-1]
        assert list(queue) == left[:-1]


@pytest.mark.parametrize("order", [(0, 0, 0.0, 0), (0, 0, 0.0, 1), (0, 0, 0.0, 3)])
def test_removing_a_request_that_is_not_there_is_an_error(order: Order) -> None:
    queue = RequestQueue()
    queue.add(make_request((0, 0, 0.0, 1)))
    with pytest.raises(NBEngineError, match="is not in the queue"):
        queue.remove(make_request(order))
    assert len(queue) == 1
