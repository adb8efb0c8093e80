"""Cores in lock step change their number while requests run; new ones join with the next wave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from process_support.engine_under_test import wait_for
from process_support.raw_client import RawClient
from process_support.wave_client import WaveClient

from nbengine.ipc.control_messages import (
    EngineReady,
    Progress,
    RanksChanged,
    Scaled,
    ScaleElasticEP,
    Shutdown,
)
from nbengine.ipc.messages import FinishReason

if TYPE_CHECKING:
    from conftest import StartLockStep

LONG = 600


def scale(client: RawClient, size: int, deadline: float = 60.0) -> None:
    """Change the number, and take notice of newcomers."""
    client.tell(ScaleElasticEP(size))
    while not isinstance(message := client.hear(deadline=deadline), Scaled):
        if isinstance(message, EngineReady):
            assert client.input.poll(int(deadline * 1000)), "the newcomer did not announce itself"
            client.input.recv_multipart()
        assert isinstance(message, (EngineReady, RanksChanged, Progress))
    assert (message.data_parallel_size, message.error) == (size, None)


def expect_tokens(client: RawClient, *names: str) -> None:
    client.wait_finished(*names, deadline=60)
    for name in names:
        assert client.tokens(name) == list(range(2, 2 + LONG)), name


def test_requests_run_on_while_cores_come_and_go(start: StartLockStep) -> None:
    engine = start(2, {"step_seconds": 0.002})
    client = WaveClient(engine.attached())
    raw = client.client
    for rank in range(2):
        client.request(f"a{rank}", rank, max_tokens=LONG)
    raw.read_until(lambda: len(raw.outputs) == 2)
    scale(raw, 3)
    wait_for(lambda: len({client.core_stats(rank).current_wave for rank in range(3)}) == 1, "one wave")
    wave = client.core_stats(2).current_wave
    assert wave > 0
    client.request("b", 2, max_tokens=LONG)
    raw.read_until(lambda: "b" in raw.outputs)
    expect_tokens(raw, "a0", "a1")
    client.request("c", 0, max_tokens=LONG)
    scale(raw, 2)
    # The one that has left has finished what it had begun.
    expect_tokens(raw, "b", "c")
    scale(raw, 1)
    client.request("d", 0, max_tokens=LONG)
    expect_tokens(raw, "d")
    assert client.core_stats(0).current_wave > wave
    raw.tell(Shutdown(drain=True))
    engine.wait_gone()


@pytest.mark.parametrize("drain", [False, True])
def test_a_shutdown_in_the_middle_of_a_change_is_a_shutdown(start_simple: StartLockStep, drain: bool) -> None:
    # What is to be aborted must not have ended before the host has turned to the shutdown.
    engine = start_simple(2, {"step_seconds": 0.0 if drain else 0.01})
    client = engine.attached()
    for rank in range(2):
        client.add(f"a{rank}", [1], rank=rank, max_tokens=LONG)
    client.read_until(lambda: len(client.outputs) == 2)
    client.tell(ScaleElasticEP(3))
    client.tell(Shutdown(drain=drain))
    engine.wait_gone(30)
    client.expect_end("the engine was shut down", expected=True)
    assert engine.host.returncode == 0
    if drain:
        expect_tokens(client, "a0", "a1")
    else:
        client.wait_finished("a0", "a1")
        assert {client.finish_reason(name) for name in ("a0", "a1")} == {FinishReason.ABORT}
