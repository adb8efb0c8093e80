"""The calls of an engine: one declaration, and what is made of it."""

from __future__ import annotations

import inspect

import pytest

from nbengine import LLM, AsyncLLM, InvalidArgumentError
from nbengine.client import calls
from nbengine.client.calls import CALLS, merged_answers
from nbengine.config import EngineArgs
from nbengine.frontend.control import AsyncControl, Control

OFFERED = [name for name in CALLS if hasattr(Control, name)]


class Caller:
    """Notes what is sent, and answers."""

    def __init__(self, answer=None, **arguments):
        self.config = EngineArgs(**arguments).create_engine_config(bound=True)
        self.answer = answer
        self.sent = []

    def call_utility(self, method, *arguments):
        self.sent.append((method, *arguments))
        return self.answer


class AsyncCaller(Caller):
    async def call_utility(self, method, *arguments):
        return super().call_utility(method, *arguments)


@pytest.mark.parametrize("name", OFFERED)
def test_a_call_looks_the_same_blocking_and_awaitable(name):
    here, there = getattr(LLM, name), getattr(AsyncLLM, name)
    if name != "check_health":
        assert inspect.signature(here) == inspect.signature(there)
        assert here.__doc__ == there.__doc__
    assert here.__doc__.endswith((".", "    "))
    assert here.__name__ == there.__name__ == name
    assert inspect.iscoroutinefunction(there)
    assert not inspect.iscoroutinefunction(here)
    assert next(iter(inspect.signature(here).parameters)) == "self"


async def test_both_send_the_same_and_give_the_same():
    caller, other = Caller(1), AsyncCaller(1)
    assert Control.sleep(caller, 2, "keep", hold=True) is None
    assert await AsyncControl.sleep(other, 2, "keep", hold=True) is None
    assert caller.sent == other.sent == [("sleep", 2, "keep", True)]
    assert Control.is_sleeping(caller) is True
    assert await AsyncControl.is_sleeping(other) is True


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sleep", {"level": 3}),
        ("sleep", {"mode": "gently"}),
        ("wake_up", {"tags": "weights"}),
        ("pause_generation", {"mode": "gently"}),
        ("start_profile", {"max_steps": 0}),
    ],
)
async def test_both_refuse_what_is_wrong_and_send_nothing(name, arguments):
    caller, other = Caller(), AsyncCaller()
    with pytest.raises(InvalidArgumentError):
        getattr(Control, name)(caller, **arguments)
    with pytest.raises(InvalidArgumentError):
        await getattr(AsyncControl, name)(other, **arguments)
    assert caller.sent == other.sent == []


def test_a_profile_goes_where_the_call_or_else_the_engine_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for caller, given, expected in (
        (Caller(), None, tmp_path / calls.DEFAULT_PROFILE_DIR),
        (Caller(profile_dir="engine"), None, tmp_path / "engine"),
        (Caller(profile_dir="engine"), "call", tmp_path / "call"),
    ):
        Control.start_profile(caller, given, max_steps=3)
        assert caller.sent == [("start_profile", str(expected), 3)]


def test_what_undoes_a_call_is_a_call_to_all_cores_that_needs_no_arguments():
    undone = {call.name: call.undone_by for call in CALLS.values() if call.undone_by}
    assert undone == {
        "pause_generation": "resume_generation",
        "sleep": "wake_up",
        "start_profile": "stop_profile",
    }
    for name in undone.values():
        assert CALLS[name].merge is not None
        assert inspect.signature(CALLS[name].arguments).bind(Caller())


def test_the_answers_of_several_cores_become_one():
    assert merged_answers("is_paused", [False, True]) is True
    assert merged_answers("reset_prefix_cache", [True, False]) is False
    assert merged_answers("sleep", [None, None]) is None
    assert merged_answers("get_supported_tasks", [["generate"], ["embed"]]) == ["generate"]
    assert merged_answers("of somebody's own", ["first", "second"]) == "first"
