"""The shared loop thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from nbengine.client.threads.loop_thread import LoopThread
from nbengine.errors import EngineDeadError, NBEngineError


def test_there_is_one_for_the_process_and_it_is_a_daemon() -> None:
    assert LoopThread.shared() is LoopThread.shared()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "nbengine-loop"]
    assert thread.daemon


async def test_a_coroutine_runs_there_while_the_callers_own_loop_is_running() -> None:
    async def where() -> tuple[str, asyncio.AbstractEventLoop]:
        return threading.current_thread().name, asyncio.get_running_loop()

    name, loop = LoopThread.shared().run(where())
    assert name == "nbengine-loop"
    assert loop is not asyncio.get_running_loop()


def test_a_blocking_call_on_its_own_thread_is_refused() -> None:
    loop_thread = LoopThread.shared()

    async def inner() -> None:
        loop_thread.run(asyncio.sleep(0))

    with pytest.raises(NBEngineError, match="never return"):
        loop_thread.run(inner())


def test_stopping_ends_the_thread_and_closes_the_loop() -> None:
    own = LoopThread()
    own.stop()
    assert own.loop.is_closed()
    own.stop()


def test_after_its_end_what_is_of_no_use_any_more_is_dropped_and_all_else_refused_by_name() -> None:
    own = LoopThread()
    own.stop()
    assert not own.call_if_open(print)
    for call in (lambda: own.call_soon(print), lambda: own.run(asyncio.sleep(0))):
        with pytest.raises(EngineDeadError, match="the interpreter is exiting"):
            call()


async def test_a_loop_that_runs_already_is_the_shared_one_until_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LoopThread, "_shared", None)
    with LoopThread.adopted() as adopted:
        assert LoopThread.shared() is adopted
        assert adopted.is_current
        assert adopted.loop is asyncio.get_running_loop()
        name = await asyncio.to_thread(lambda: adopted.run(_name()))
        assert name == threading.current_thread().name
        with pytest.raises(NBEngineError, match="runs already"), LoopThread.adopted():
            pass
        assert LoopThread.shared() is adopted
    assert LoopThread._shared is None


def test_no_loop_is_adopted_where_a_shared_one_runs() -> None:
    LoopThread.shared()

    async def adopt() -> None:
        with LoopThread.adopted():
            pass

    with pytest.raises(NBEngineError, match="runs already"):
        asyncio.run(adopt())


async def _name() -> str:
    return threading.current_thread().name
