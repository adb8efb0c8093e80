"""Requests between clients and an engine: what comes back, to whom, and in what order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from process_support.engine_under_test import EngineUnderTest, wait_for
from process_support.fake_executor import VOCAB_SIZE
from process_support.raw_client import RawClient

from nbengine.ipc.control_messages import Attached
from nbengine.ipc.messages import (
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    encode_announcement,
)
from tests.support.thorough import amount

NUM_REQUESTS = amount(2000, thorough=10_000)


@pytest.fixture(scope="module")
def shared_engine(start_shared_engine) -> EngineUnderTest:
    return start_shared_engine()


@pytest.fixture(scope="module")
def shared_slow_engine(start_shared_engine) -> EngineUnderTest:
    return start_shared_engine({"step_seconds": 0.01})


def with_clients(engine: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """An engine, the clients of which leave after the test."""
    yield engine
    while engine.clients:
        engine.clients.pop().leave()


@pytest.fixture
def engine(shared_engine: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """An engine that many tests share."""
    yield from with_clients(shared_engine)


@pytest.fixture
def slow(shared_slow_engine: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """One that takes 10 ms a step."""
    yield from with_clients(shared_slow_engine)


@pytest.fixture
def client(shared_engine: EngineUnderTest) -> Iterator[RawClient]:
    """A new client of an engine that many tests share, whatever the others have done to it."""
    client = RawClient(shared_engine.info).attach()
    yield client
    client.leave()


def test_tokens_stream_one_step_at_a_time_and_end_by_length(client: RawClient) -> None:
    client.add("r", [10, 20, 30], max_tokens=5)
    client.wait_finished("r")
    assert client.tokens("r") == [31, 32, 33, 34, 35]
    assert [len(output.new_token_ids) for output in client.outputs["r"]] == [1] * 5
    assert client.finish_reason("r") is FinishReason.LENGTH


def test_stop_token_ends_a_request(client: RawClient) -> None:
    client.add("r", [1], max_tokens=50, stop_token_ids=[4])
    client.wait_finished("r")
    assert client.tokens("r") == [2, 3, 4]
    assert client.finish_reason("r") is FinishReason.STOP


def test_each_client_gets_its_own_outputs_and_nothing_else(engine: EngineUnderTest) -> None:
    first, second = engine.client().attach(), engine.client().attach()
    assert first.client_index != second.client_index
    for number in range(20):
        first.add(f"a{number}", [number])
        second.add(f"b{number}", [100 + number])
    first.wait_finished(*(f"a{n}" for n in range(20)))
    second.wait_finished(*(f"b{n}" for n in range(20)))
    assert set(first.outputs) == {f"a{n}" for n in range(20)}
    assert set(second.outputs) == {f"b{n}" for n in range(20)}
    assert second.tokens("b3") == list(range(104, 112))


def test_a_request_belongs_to_the_socket_it_came_from(engine: EngineUnderTest) -> None:
    honest, liar = engine.client().attach(), engine.client().attach()
    request = EngineCoreRequest("r", [1], None, client_index=honest.client_index)
    liar.send(EngineCoreRequestType.ADD, request)
    liar.wait_finished("r")
    honest.add("mine", [1])
    honest.wait_finished("mine")
    assert "r" not in honest.outputs


def test_thousands_of_requests_all_arrive_and_all_end(engine: EngineUnderTest) -> None:
    client = engine.client().attach()
    ids = [f"r{n}" for n in range(NUM_REQUESTS)]
    for number, request_id in enumerate(ids):
        client.add(request_id, [number % VOCAB_SIZE], max_tokens=2)
    client.wait_finished(*ids, deadline=120)
    assert all(
        client.tokens(f"r{n}") == [(n + 1) % VOCAB_SIZE, (n + 2) % VOCAB_SIZE] for n in range(NUM_REQUESTS)
    )
    assert client.call("stats")[1][1:3] == [0, 0]


def test_an_aborted_request_gets_no_more_tokens_and_frees_its_blocks(slow: EngineUnderTest) -> None:
    client = slow.client().attach()
    client.add("long", [1], max_tokens=400)
    client.add("other", [1], max_tokens=30)
    client.read_until(lambda: len(client.tokens("long")) >= 3)
    client.abort("long", "never heard of")
    # It comes behind the abort.
    client.add("behind", [1], max_tokens=30)
    client.read_until(lambda: client.tokens("behind"))
    so_far = len(client.tokens("long"))
    client.wait_finished("other", "behind")
    assert not client.finished("long")
    assert len(client.tokens("long")) == so_far
    stats = client.subscribe()
    idle = client.read_stats(stats, lambda s: not s.engines_running)
    assert idle.engines[0].num_free_blocks == idle.engines[0].num_blocks == 64


def test_an_abort_that_arrives_during_a_step_takes_effect_in_that_step(start_engine, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    engine = start_engine({"hold": str(hold)})
    client = engine.client().attach()
    client.add("r", [1], max_tokens=400)
    wait_for(lambda: "a step is held" in engine.log(), "the step")
    client.abort("r")
    # The thread that reads refuses this one itself: it has read the abort.
    client.add("refused", [VOCAB_SIZE])
    client.wait_finished("refused")
    hold.unlink()
    stats = client.subscribe()
    idle = client.read_stats(stats, lambda s: s.engines[0].step_counter and not s.engines_running)
    # The one that was held, and a blank one.
    assert idle.engines[0].step_counter <= 2
    client.add("after", [1], max_tokens=1)
    client.wait_finished("after")
    assert "r" not in client.outputs


def test_a_client_cannot_abort_the_requests_of_another(slow: EngineUnderTest) -> None:
    owner, stranger = slow.client().attach(), slow.client().attach()
    owner.add("r", [1], max_tokens=20)
    owner.read_until(lambda: owner.tokens("r"))
    stranger.abort("r")
    owner.wait_finished("r")
    assert len(owner.tokens("r")) == 20


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ([], {}, "no tokens"),
        ([VOCAB_SIZE], {}, f"token id {VOCAB_SIZE}"),
        ([2**40], {}, "token id"),
        ([1] * 512, {}, "max_model_len=512"),
        ([1], {"allowed_token_ids": [5000]}, "allowed_token_ids"),
        ([1], {"logit_bias": {5000: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_a_bad_request_fails_alone_and_says_why(client: RawClient, prompt, params, reason) -> None:
    client.add("good", [1])
    client.add("bad", prompt, **params)
    client.wait_finished("good", "bad")
    assert client.finish_reason("bad") is FinishReason.ERROR
    assert reason in client.outputs["bad"][0].error
    assert client.finish_reason("good") is FinishReason.LENGTH


def test_a_request_id_in_use_is_refused(slow: EngineUnderTest) -> None:
    first, second = slow.client().attach(), slow.client().attach()
    first.add("r", [1], max_tokens=400)
    first.read_until(lambda: first.tokens("r"))
    second.add("r", [1])
    second.wait_finished("r")
    assert second.finish_reason("r") is FinishReason.ERROR
    so_far = len(first.tokens("r"))
    first.read_until(lambda: len(first.tokens("r")) >= so_far + 20)
    assert not first.finished("r")
    assert first.tokens("r") == list(range(2, 2 + len(first.tokens("r"))))


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00"],
        [b"\x00", b"\xc1\xc1"],
        [b"\x00", b"\x91" * 3000],
        [b"\x01", b"\x93\x01\x02\x03"],
        [b"\x03", b"\xa5hello"],
        [b"\x02", b"\x00"],
        [b"\x04", b"\x00"],
        [b"nonsense", b"\x90", b"x" * 1000],
    ],
    ids=[
        "no frames",
        "empty ADD",
        "garbage ADD",
        "deeply nested ADD",
        "ABORT of numbers",
        "UTILITY of a string",
        "START_DP_WAVE",
        "WAKEUP",
        "unknown type",
    ],
)
def test_malformed_frames_harm_nobody(client: RawClient, frames: list[bytes]) -> None:
    client.send_frames(*frames)
    client.add("good", [1])
    client.wait_finished("good")
    assert client.call("ping") == (None, "pong")


def test_an_undecodable_request_is_answered_when_its_id_can_be_read(client: RawClient) -> None:
    client.send(EngineCoreRequestType.ADD, ["r", [1, 2], {"temperature": -3}])
    client.wait_finished("r")
    assert client.finish_reason("r") is FinishReason.ERROR
    assert "temperature" in client.outputs["r"][0].error
    client.send(EngineCoreRequestType.UTILITY, [0, 7, {"not": "a name"}, []])
    client.read_until(lambda: 7 in client.utility)
    assert "cannot be decoded" in client.utility[7].failure_message


def test_utility_calls_answer_their_caller(client: RawClient) -> None:
    assert client.call("get_supported_tasks") == (None, ["generate"])
    assert client.call("reset_prefix_cache", call_id=2) == (None, True)
    failure, result = client.call("rm_rf", call_id=3)
    assert result is None
    assert "no utility method 'rm_rf'" in failure
    assert "reset_prefix_cache" in failure
    failure, _ = client.call("ping", "too", "many", call_id=4)
    assert "TypeError" in failure
    assert client.call("ping", call_id=5) == (None, "pong")


def test_a_prefix_cache_in_use_is_not_reset(slow: EngineUnderTest) -> None:
    client = slow.client().attach()
    client.add("r", [1] * 40, max_tokens=400)
    client.read_until(lambda: client.tokens("r"))
    assert client.call("reset_prefix_cache") == (None, False)


def test_a_prompt_seen_before_is_found_in_the_cache(client: RawClient) -> None:
    assert client.call("reset_prefix_cache") == (None, True)
    for request_id in ("cold", "warm"):
        client.add(request_id, list(range(50)), max_tokens=1)
        client.wait_finished(request_id)
    assert client.outputs["cold"][0].num_cached_tokens == 0
    assert client.outputs["warm"][0].num_cached_tokens == 48


def test_a_client_whose_addresses_lead_nowhere_is_ignored(start_engine) -> None:
    engine = start_engine()
    broken = engine.client()
    attach = broken.attach_message()
    attach.input_address = "nonsense://"
    broken.tell(attach)
    broken.hear()
    client = engine.client().attach()
    client.add("r", [1])
    client.wait_finished("r")
    assert "cannot be attached" in engine.log()


def test_a_client_whose_output_socket_takes_nothing_does_not_stop_the_others(start_engine) -> None:
    engine = start_engine()
    deaf = engine.client()
    # A ROUTER is no partner for the core's PUSH: nothing that is sent there can ever be delivered.
    deaf.output.close()
    deaf.output = deaf._socket(zmq.ROUTER)
    deaf.output.bind(deaf.output_address)
    deaf.attach(is_greeted=False)
    for number in range(50):
        deaf.add(f"d{number}", [1])
    client = engine.client().attach()
    client.add("r", [1])
    client.wait_finished("r")
    idle = client.read_stats(client.subscribe(), lambda s: not s.engines_running)
    assert idle.engines[0].num_free_blocks == 64


def test_the_ranks_identity_and_its_incarnation_introduce_the_core(engine: EngineUnderTest) -> None:
    client = engine.client()
    client.tell(client.attach_message())
    index = client.hear(Attached).client_index
    assert client.input.poll(60_000)
    assert client.input.recv_multipart() == [client.identity(0), encode_announcement(index, 0)]
