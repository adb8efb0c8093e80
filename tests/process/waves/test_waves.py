"""Cores in lock step: they help each other, come to rest together, and end together; with real processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from process_support.engine_under_test import wait_for
from process_support.wave_client import WaveClient

from nbengine.ipc.control_messages import EngineDead, Shutdown
from nbengine.ipc.messages import FIRST_REQ, FinishReason

if TYPE_CHECKING:
    from conftest import LockStepEngine, StartLockStep


def ended(tokens: int) -> list[int]:
    """Return the tokens that follow the prompt [1]."""
    return list(range(2, 2 + tokens))


def expect_rest(engine: LockStepEngine, client: WaveClient) -> int:
    """Wait until all cores pause, with the same numbers of batches, and begin no others. Returns the wave.

    Until the coordinator has read all that the client has told it, another wave may begin for nobody.
    """
    waves: set[int] = set()

    def at_rest() -> bool:
        batches = engine.num_batches()
        cores = [client.core_stats(rank) for rank in range(engine.num_ranks) for _ in range(3)]
        waves.clear()
        waves.update([core.current_wave for core in cores])
        is_quiet = len(waves) == 1 and not any(core.engines_running for core in cores)
        return is_quiet and len(set(batches)) == 1 and engine.num_batches() == batches

    wait_for(at_rest, "a rest")
    (wave,) = waves
    client.wait_stats(lambda stats: stats.current_wave >= wave and not stats.engines_running)
    return wave


def test_the_others_help_with_dummy_batches_and_all_come_to_rest(start: StartLockStep) -> None:
    engine = start(3)
    client = WaveClient(engine.attached())
    assert expect_rest(engine, client) == 0
    assert engine.num_batches() == [0, 0, 0]
    # Without FIRST_REQ.
    client.client.add("a", [1], rank=1, max_tokens=20)
    client.client.wait_finished("a")
    assert client.client.tokens("a") == ended(20)
    first = expect_rest(engine, client)
    assert first >= 1
    for rank, length in enumerate((50, 7, 70)):
        client.request(f"b{rank}", rank, max_tokens=length)
    client.client.wait_finished("b0", "b1", "b2")
    assert [client.client.tokens(f"b{rank}") for rank in range(3)] == [ended(50), ended(7), ended(70)]
    assert expect_rest(engine, client) > first
    dummies = [client.core_stats(rank).num_dummy_steps for rank in range(3)]
    # Each has its own requests; the rest of what all have computed was for the others.
    assert all(0 < dummy < total for dummy, total in zip(dummies, engine.num_batches(), strict=True))


def test_a_core_on_its_own_does_no_dummy_batch(start: StartLockStep) -> None:
    engine = start(1)
    client = WaveClient(engine.attached())
    for number in range(3):
        client.request(f"r{number}", 0, max_tokens=10)
        client.client.wait_finished(f"r{number}")
    assert expect_rest(engine, client) >= 1
    assert engine.num_batches() == [30]
    assert client.core_stats(0).num_dummy_steps == 0


def test_aborted_and_refused_requests_leave_nobody_behind(pair: LockStepEngine) -> None:
    engine, client = pair, WaveClient(pair.attached())
    before = expect_rest(engine, client)
    # The coordinator is told of a request that its core refuses, or never gets.
    client.request("refused", 1, stop_token_ids=[99_999])
    client.client.wait_finished("refused")
    assert client.client.finish_reason("refused") is FinishReason.ERROR
    client.wait_stats(lambda stats: stats.current_wave > before)
    wave = expect_rest(engine, client)
    client.first_request(0, 0)
    client.wait_stats(lambda stats: stats.current_wave > wave)
    expect_rest(engine, client)
    client.request("aborted", 1, max_tokens=4000)
    client.client.read_until(lambda: "aborted" in client.client.outputs)
    client.client.abort("aborted", rank=1)
    expect_rest(engine, client)
    client.request("last", 0, max_tokens=5)
    client.client.wait_finished("last")
    assert client.client.tokens("last") == ended(5)


@pytest.mark.parametrize("shared_pair", ["one-batch"], indirect=True)
def test_what_is_no_message_is_dropped_by_the_coordinator(pair: LockStepEngine) -> None:
    engine, client = pair, WaveClient(pair.attached())
    expect_rest(engine, client)
    for payload in ((), (0,), (0, 0, 0), ("0", 0), (7, 0), (-1, 0), (0, -1), (0, 2**63)):
        client.first_request(*payload)
    for frames in (
        [FIRST_REQ],
        [FIRST_REQ, b"\xc1"],
        [b"junk"],
        [b"junk", b"more"],
        [FIRST_REQ, b"\x92", b"x"],
    ):
        client.front.send_multipart(frames)
    client.request("r", 1, max_tokens=5)
    client.client.wait_finished("r")
    expect_rest(engine, client)
    wait_for(lambda: "no message of a subscriber" in engine.log(), "a word about it")
    assert "dropped a message to the coordinator" in engine.log()


def test_a_pause_that_keeps_requests_lets_all_rest_until_the_resumption(pair: LockStepEngine) -> None:
    engine, client = pair, WaveClient(pair.attached())
    expect_rest(engine, client)
    for rank in range(2):
        client.request(f"r{rank}", rank, max_tokens=800)
    client.client.read_until(lambda: len(client.client.outputs) == 2)
    for rank in range(2):
        client.client.start_call("pause_generation", "keep", False, call_id=rank, rank=rank)
    for rank in range(2):
        assert client.client.wait_answer(rank) == (None, None)
    wave = expect_rest(engine, client)
    assert not client.client.finished("r0")
    assert client.client.call("resume_generation", rank=1) == (None, None)
    client.client.wait_finished("r1")
    assert client.client.call("resume_generation", rank=0) == (None, None)
    client.client.wait_finished("r0")
    assert [client.client.tokens(f"r{rank}") for rank in range(2)] == [ended(800)] * 2
    assert expect_rest(engine, client) > wave


def test_no_core_computes_for_one_that_sleeps_and_waking_one_by_one_strands_nothing(
    pair: LockStepEngine,
) -> None:
    engine, client = pair, WaveClient(pair.attached())
    expect_rest(engine, client)
    for rank in range(2):
        client.request(f"r{rank}", rank, max_tokens=800)
    client.client.read_until(lambda: len(client.client.outputs) == 2)
    # The first cannot sleep before the second has been told to.
    client.client.start_call("sleep", 1, "keep", call_id=10, rank=0)
    client.client.start_call("sleep", 1, "keep", call_id=11, rank=1)
    for call_id in (10, 11):
        assert client.client.wait_answer(call_id) == (None, None)
    client.request("late", 1, max_tokens=5)
    batches = engine.num_batches()
    assert client.client.call("wake_up", rank=0) == (None, None)
    # It has work, and the other sleeps: it must neither compute nor be stuck.
    assert client.client.call("ping", rank=0) == (None, "pong")
    assert engine.num_batches() == batches
    assert client.client.call("wake_up", rank=1) == (None, None)
    client.client.wait_finished("r0", "r1", "late")
    assert client.client.tokens("r0") == client.client.tokens("r1") == ended(800)
    expect_rest(engine, client)


@pytest.mark.parametrize("shared_pair", ["one-batch"], indirect=True)
def test_one_core_that_is_told_to_sleep_waits_for_the_others_requests(pair: LockStepEngine) -> None:
    engine, client = pair, WaveClient(pair.attached())
    expect_rest(engine, client)
    client.request("r", 1, max_tokens=100)
    client.client.read_until(lambda: "r" in client.client.outputs)
    client.client.start_call("sleep", 2, call_id=1, rank=0)
    client.client.read_until(lambda: 1 in client.client.utility)
    # A core that slept before could compute for nobody: r would not end. The two cores' outputs come in any order.
    client.client.wait_finished("r")
    assert client.client.wait_answer(1) == (None, None)
    # Nobody can compute now.
    client.request("held", 1, max_tokens=5)
    assert client.client.call("ping", rank=1) == (None, "pong")
    assert client.client.call("wake_up", rank=0) == (None, None)
    client.client.wait_finished("held")
    expect_rest(engine, client)


def test_a_drain_is_over_for_all_when_it_is_for_the_last(start: StartLockStep) -> None:
    engine = start(3, {"step_seconds": 0.001})
    client = engine.attached()
    client.add("long", [1], rank=2, max_tokens=300)
    client.add("short", [1], rank=1, max_tokens=3)
    client.wait_finished("short")
    client.tell(Shutdown(drain=True))
    client.wait_finished("long")
    assert client.tokens("long") == ended(300)
    assert client.hear(EngineDead).expected
    engine.wait_gone()
    assert len(set(engine.num_batches())) == 1


@pytest.mark.parametrize("sleeping", [(), (0,), (0, 1)], ids=["awake", "one-asleep", "asleep"])
def test_an_end_at_once_is_clean_even_under_load(
    start_simple: StartLockStep, sleeping: tuple[int, ...]
) -> None:
    engine = start_simple(2, {"step_seconds": 0.001})
    client = engine.attached()
    for number, rank in enumerate(sleeping):
        assert client.call("sleep", 1, "abort", call_id=number, rank=rank) == (None, None)
    client.add("a", [1], rank=0, max_tokens=3000)
    client.add("b", [1], rank=1, max_tokens=3000)
    if not sleeping:
        client.read_until(lambda: len(client.outputs) == 2)
    began = time.monotonic()
    client.tell(Shutdown(drain=False))
    client.expect_end("the engine was shut down", expected=True)
    assert {client.finish_reason(name) for name in ("a", "b") if client.finished(name)} <= {
        FinishReason.ABORT
    }
    engine.wait_gone()
    assert "killed" not in engine.log()
    assert time.monotonic() - began < 60
