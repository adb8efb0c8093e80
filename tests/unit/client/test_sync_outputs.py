"""The outputs that the client of `LLM` keeps, and whom a lost lease concerns."""

from __future__ import annotations

import pytest

from nbengine.client.sync_mp import OutputQueue
from nbengine.errors import EngineDeadError, LeaseExpiredError
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason

LOST = LeaseExpiredError("the lease was lost")


def ended(name: str) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput(name, [1], finish_reason=FinishReason.LENGTH)])


def test_a_lost_lease_fails_a_request_though_others_were_sent_under_the_next() -> None:
    queue = OutputQueue()
    queue.add("before", 1)
    queue.on_error(LOST, dead=False, client_index=1)
    queue.add("after", 2)
    queue.on_outputs(ended("after"))
    with pytest.raises(LeaseExpiredError):
        queue.get()
    assert queue.get() == ended("after")


@pytest.mark.parametrize("how", ["output", "without a word", "aborted"])
def test_a_lease_that_was_lost_while_no_request_was_under_way_concerns_nobody(how: str) -> None:
    queue = OutputQueue()
    queue.add("before", 1)
    if how == "aborted":
        queue.forget(["before"])
    else:
        end = ended("before") if how == "output" else EngineCoreOutputs(finished_requests=["before"])
        queue.on_outputs(end)
        assert queue.get() == end
    queue.on_error(LOST, dead=False, client_index=1)
    queue.add("after", 2)
    queue.on_outputs(ended("after"))
    assert queue.get() == ended("after")


def test_a_request_whose_first_tokens_were_fetched_is_under_way() -> None:
    queue = OutputQueue()
    queue.add("r", 1)
    queue.on_outputs(EngineCoreOutputs(outputs=[EngineCoreOutput("r", [1])]))
    queue.get()
    queue.on_error(LOST, dead=False, client_index=1)
    with pytest.raises(LeaseExpiredError):
        queue.get()


def test_the_end_of_the_engine_is_told_each_time() -> None:
    queue = OutputQueue()
    queue.on_error(EngineDeadError("it ended"), dead=True, client_index=1)
    for _ in range(3):
        with pytest.raises(EngineDeadError, match="it ended"):
            queue.get()
