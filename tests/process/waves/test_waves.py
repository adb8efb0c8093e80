"""Cores in lock step with real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from process_support.engine_under_test import wait_for

if TYPE_CHECKING:
    from conftest import StartLockStep


def test_a_request_to_one_core_is_finished_with_the_help_of_the_others(start: StartLockStep) -> None:
    engine = start(2)
    client = engine.attached()
    client.add("a", [1], rank=1, max_tokens=20)
    client.wait_finished("a")
    assert client.tokens("a") == list(range(2, 22))
    client.add("b", [1], rank=0, max_tokens=50)
    client.add("c", [1], rank=1, max_tokens=70)
    client.wait_finished("b", "c")
    assert client.tokens("c") == list(range(2, 72))
    wait_for(lambda: len(set(engine.num_batches())) == 1, "equal numbers")
