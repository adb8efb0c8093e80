"""The store of responses keeps the latest, within its bounds."""

from __future__ import annotations

import pytest

from nbengine.server.protocol.errors import ApiError
from nbengine.server.response_store import ResponseStore


def put(store: ResponseStore, response_id: str, text: str = "x") -> None:
    store.put({"id": response_id}, [{"role": "user", "content": text}])


def test_a_response_is_found_with_its_conversation() -> None:
    store = ResponseStore()
    put(store, "resp_a", "Hi")
    stored = store.get("resp_a")
    assert (stored.response, stored.conversation) == ({"id": "resp_a"}, [{"role": "user", "content": "Hi"}])


def test_the_one_that_was_used_least_lately_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    put(store, "a")
    put(store, "b")
    store.get("a")
    put(store, "c")
    with pytest.raises(ApiError, match="'b'"):
        store.get("b")
    assert {store.get(name).response["id"] for name in ("a", "c")} == {"a", "c"}


def test_the_bytes_of_all_together_stay_within_their_bound() -> None:
    store = ResponseStore(max_bytes=1000)
    for name in "abcd":
        put(store, name, "x" * 300)
    assert len(store) == 2
    put(store, "huge", "x" * 2000)
    assert len(store) == 2
    store.delete("c")
    store.delete("d")
    put(store, "e", "x" * 900)
    assert len(store) == 1


def test_an_unknown_one_is_not_found_and_as_an_argument_a_bad_request() -> None:
    with pytest.raises(ApiError) as missing:
        ResponseStore().get("resp_a")
    assert missing.value.status == 404
    with pytest.raises(ApiError) as wrong:
        ResponseStore().get("resp_a", "previous_response_id")
    assert (wrong.value.status, wrong.value.param) == (400, "previous_response_id")
    with pytest.raises(ApiError):
        ResponseStore().delete("resp_a")
