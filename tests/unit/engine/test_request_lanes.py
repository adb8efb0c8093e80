"""Lanes of the busy loop: turns between clients, and the order of each client's own, against lists."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from nbengine.engine.core.request_lanes import RequestLanes
from nbengine.engine.core.work import AddRequest
from nbengine.ipc.messages import UtilityRequest
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.request import Request

PARAMS = SamplingParams()


def request(request_id: str, client: int) -> AddRequest:
    return AddRequest(Request(request_id, [1], PARAMS, client_index=client), 0)


def names(items) -> list[str]:
    return [item.request.request_id if isinstance(item, AddRequest) else item.method for item in items]


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3), st.integers(0, 5)),
        st.tuples(st.just("call"), st.integers(1, 3), st.integers(0, 5)),
        st.tuples(st.just("take"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("drop"), st.integers(1, 3), st.integers(0, 5)),
        st.tuples(st.just("drop all"), st.integers(1, 3), st.just(0)),
    ),
    max_size=40,
)


@given(events=events)
@example(events=[("add", 1, 0), ("add", 1, 1), ("add", 2, 0), ("take", 3, 0)])
def test_each_client_has_its_order_and_none_is_served_twice_before_another_that_waits(events) -> None:
    lanes = RequestLanes()
    waiting: dict[int, list[str]] = {}
    # Clients in the order of their turns.
    turns: list[int] = []
    for kind, number, item in events:
        if kind in ("add", "call"):
            name = f"{kind}{item}"
            if kind == "add" and name in waiting.get(number, []):
                continue
            lanes.put(request(name, number) if kind == "add" else UtilityRequest(number, 1, name, []))
            waiting.setdefault(number, []).append(name)
            turns += [number] * (number not in turns)
        elif kind == "take":
            expected = []
            while turns and len(expected) < number:
                client = turns.pop(0)
                expected.append(waiting[client].pop(0))
                turns += [client] * bool(waiting[client])
            assert names(lanes.take(number)) == expected
        else:
            own = waiting.get(number, [])
            wanted = own if kind == "drop all" else [name for name in own if name == f"add{item}"]
            dropped = lanes.drop(number, None if kind == "drop all" else [f"add{item}", "unknown"])
            assert names(dropped) == [name for name in wanted if name.startswith("add")]
            waiting[number] = [name for name in own if name not in wanted]
            turns = [client for client in turns if waiting[client]]
        assert bool(lanes) == any(waiting.values())


def test_an_id_that_is_used_twice_is_taken_out_twice() -> None:
    lanes = RequestLanes()
    for _ in range(2):
        lanes.put(request("a", 1))
    assert names(lanes.take(5)) == ["a", "a"]
