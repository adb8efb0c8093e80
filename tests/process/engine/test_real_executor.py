"""The engine side with a real model and the real executor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import EngineUnderTest
from process_support.raw_client import RawClient

from nbengine.config import CacheConfig, EngineConfig, ModelConfig
from nbengine.ipc.liveness import identity_of, is_alive
from nbengine.ipc.messages import FinishReason
from nbengine.models.checkpoints.files import resolve_model

NUM_BLOCKS = 64
START_DEADLINE = 60.0

pytestmark = pytest.mark.timeout(180)


def tiny_engine() -> EngineUnderTest:
    config = EngineConfig(
        model=resolve_model(ModelConfig(model="random-tiny", device="cpu", dtype="float32")),
        cache=CacheConfig(num_gpu_blocks_override=NUM_BLOCKS),
        bound=False,
    )
    engine = EngineUnderTest(config)
    engine.wait_ready(START_DEADLINE)
    return engine


@pytest.fixture(scope="module")
def shared_engine(private_runtime_dir: Path, private_socket_dir: Path) -> Iterator[EngineUnderTest]:
    engine = tiny_engine()
    yield engine
    engine.close()


@pytest.fixture
def clients(shared_engine: EngineUnderTest) -> Iterator[list[RawClient]]:
    pair = [RawClient(shared_engine.info).attach(START_DEADLINE) for _ in range(2)]
    yield pair
    for client in pair:
        client.leave()


def test_greedy_tokens_do_not_depend_on_who_asks_or_on_the_company(clients: list[RawClient]) -> None:
    first, second = clients
    prompts = [[10 + n, 20, 30 + n] * (1 + n) for n in range(6)]
    first.add("alone", prompts[0], max_tokens=12)
    first.wait_finished("alone", deadline=START_DEADLINE)
    for number, prompt in enumerate(prompts):
        for client in clients:
            client.add(f"{number} of {client.client_index}", prompt, max_tokens=12)
    for client in clients:
        client.wait_finished(*(f"{n} of {client.client_index}" for n in range(6)), deadline=START_DEADLINE)
    answers = [[c.tokens(f"{n} of {c.client_index}") for n in range(6)] for c in clients]
    assert answers[0] == answers[1]
    assert answers[0][0] == first.tokens("alone")
    assert all(len(tokens) == 12 for tokens in answers[0])
    assert second.finish_reason(f"0 of {second.client_index}") is FinishReason.LENGTH


def test_aborts_and_departures_free_every_block(
    clients: list[RawClient], shared_engine: EngineUnderTest
) -> None:
    staying, stats = clients[0], clients[0].subscribe()
    leaving = RawClient(shared_engine.info).attach()
    for client in (staying, leaving):
        client.add(f"r{client.client_index}", [1, 2, 3], max_tokens=500, ignore_eos=True)
        client.read_until(lambda client=client: client.outputs)
    staying.abort(f"r{staying.client_index}")
    leaving.leave()
    idle = staying.read_stats(stats, lambda s: s.engines[0].step_counter and not s.engines_running)
    assert idle.engines[0].num_free_blocks == NUM_BLOCKS


def test_a_request_that_the_model_cannot_take_leaves_the_others_alone(clients: list[RawClient]) -> None:
    client, _ = clients
    client.add("good", [1, 2, 3])
    client.add("bad", [10**6])
    client.wait_finished("good", "bad", deadline=START_DEADLINE)
    assert client.finish_reason("bad") is FinishReason.ERROR
    assert len(client.tokens("good")) == 8


def test_a_busy_engine_does_not_outlive_its_host() -> None:
    engine = tiny_engine()
    client = engine.client().attach(START_DEADLINE)
    try:
        for number in range(16):
            client.add(f"r{number}", [number + 1, 2, 3], max_tokens=400, ignore_eos=True)
        client.read_until(lambda: client.outputs, START_DEADLINE)
        core = identity_of(engine.core().pid)
        engine.host.kill()
        client.wait_dead()
        engine.wait_gone()
        assert core is not None
        assert not is_alive(core)
        assert not engine.run_dir.exists()
        # It was busy: it had not come to the end of what was asked.
        assert not client.finished(*(f"r{number}" for number in range(16)))
    finally:
        engine.close()
