"""Steps in flight in a real engine core: ends, deaths and utilities find them in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from process_support.engine_under_test import ASYNC_FAKE_EXECUTOR, EngineUnderTest
from process_support.raw_client import RawClient

from nbengine.config import ParallelConfig
from nbengine.ipc.control_messages import Shutdown
from nbengine.ipc.messages import FinishReason

StartEngine = Callable[..., EngineUnderTest]


@pytest.fixture
def start(start_engine: StartEngine) -> StartEngine:
    """Start an engine whose executor keeps two steps in flight."""

    def start(**knobs: object) -> EngineUnderTest:
        parallel = ParallelConfig(distributed_executor_backend=ASYNC_FAKE_EXECUTOR)
        engine = start_engine({"step_seconds": 0.005, **knobs}, parallel=parallel)
        engine.wait_ready()
        return engine

    return start


def attached(engine: EngineUnderTest) -> RawClient:
    return engine.client().attach()


def test_clients_get_their_tokens_aborts_free_blocks_and_utilities_are_answered(start: StartEngine) -> None:
    engine = start()
    first, second = attached(engine), attached(engine)
    for client in (first, second):
        for number in range(8):
            client.add(f"r{number} of {client.client_index}", [10 * number], max_tokens=5 + number)
        client.add(f"endless of {client.client_index}", [1], max_tokens=400, ignore_eos=True)
    assert first.call("ping") == (None, "pong")
    for client in (first, second):
        names = [f"r{number} of {client.client_index}" for number in range(8)]
        client.wait_finished(*names)
        for number, name in enumerate(names):
            assert client.tokens(name) == [10 * number + n for n in range(1, 6 + number)]
    first.abort(f"endless of {first.client_index}")
    second.leave()
    stats = first.subscribe()
    idle = RawClient.read_stats(stats, lambda s: s.engines[0].num_free_blocks == s.engines[0].num_blocks)
    assert idle.engines[0].num_running_reqs == 0
    stats.close()
    first.add("after", [500], max_tokens=3)
    first.wait_finished("after")
    assert first.tokens("after") == [501, 502, 503]


def test_a_failing_step_with_another_in_flight_gives_the_models_own_error(start: StartEngine) -> None:
    engine = start(fail_at_token=40)
    client = attached(engine)
    client.add("r", [1], max_tokens=400, ignore_eos=True)
    client.wait_dead()
    client.expect_end("the model broke at token 40", expected=False)
    engine.wait_gone()
    assert "step 38 (1 tokens of 1 requests: r: 1) failed" in engine.log()
    assert client.tokens("r") == list(range(2, 40))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_core_that_is_killed_with_steps_in_flight_leaves_nothing(start: StartEngine, number: int) -> None:
    engine = start()
    client = attached(engine)
    client.add("r", [1], max_tokens=400, ignore_eos=True)
    client.read_until(lambda: len(client.tokens("r")) > 3)
    os.kill(engine.core().pid, number)
    client.expect_end("SIGKILL" if number == signal.SIGKILL else "SIGTERM", expected=number == signal.SIGTERM)
    if number == signal.SIGTERM:
        client.wait_dead()
    tokens = client.tokens("r")
    assert tokens == list(range(2, 2 + len(tokens)))
    if number == signal.SIGTERM:
        assert client.finish_reason("r") is FinishReason.ABORT
    engine.wait_gone()


def test_an_end_of_the_host_after_a_drain_delivers_every_token(start: StartEngine) -> None:
    engine = start()
    client = attached(engine)
    client.add("r", [1], max_tokens=60, ignore_eos=True)
    client.read_until(lambda: len(client.tokens("r")) > 3)
    client.tell(Shutdown(drain=True))
    client.wait_finished("r")
    assert client.tokens("r") == list(range(2, 62))
    engine.wait_gone()
