"""Several completions of one prompt, seen as one request."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from tokenizers import Tokenizer

from nbengine.errors import InvalidArgumentError, RequestError
from nbengine.frontend.outputs.logprobs import LogprobsProcessor
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.outputs.parallel_sampling import ParentRequest, make_children
from nbengine.frontend.outputs.request_state import RequestState
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.frontend.text.detokenizer import IncrementalDetokenizer
from nbengine.ipc.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from nbengine.outputs import RequestOutput
from nbengine.sampling_params import MAX_SEED, RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
LENGTH, ERROR = FinishReason.LENGTH, FinishReason.ERROR
IDS = ["0_r-1", "1_r-1", "2_r-1"]


def request(kind: RequestOutputKind = DELTA, **options: Any) -> EngineCoreRequest:
    params = SamplingParams(output_kind=kind, **{"n": 3, **options})
    return EngineCoreRequest("r-1", [1, 2], params, arrival_time=5.0, external_req_id="r")


class Harness:
    """An output processor with one request of three completions."""

    def __init__(self, tokenizer: Tokenizer, kind: RequestOutputKind = DELTA, *, queued: bool = True) -> None:
        self.processor = OutputProcessor(TextDecoding(tokenizer))
        self.queue = RequestOutputCollector(kind, "r", "r-1")
        self.sent = self.processor.add_request(request(kind), "p", self.queue if queued else None)

    def step(self, *outputs: EngineCoreOutput) -> Any:
        return self.processor.process_outputs(outputs)

    def read(self) -> RequestOutput:
        return self.queue.get_blocking(timeout=0)


@pytest.fixture
def harness(byte_level: Tokenizer) -> Harness:
    return Harness(byte_level)


def test_children_are_the_request_with_an_id_and_a_seed_of_their_own() -> None:
    parent = request(seed=40, stop=["x"], prompt_logprobs=2, logprobs=1)
    parent.priority, parent.cache_salt = 3, "salt"
    assert parent.sampling_params is not None
    children = make_children(parent, parent.sampling_params)
    assert [child.request_id for child in children] == IDS
    params = [child.sampling_params for child in children]
    assert [p.seed for p in params if p] == [40, 41, 42]
    assert [p.prompt_logprobs for p in params if p] == [2, None, None]
    assert all(p is not None and (p.n, p.stop, p.logprobs) == (1, ["x"], 1) for p in params)
    assert all(
        (child.priority, child.cache_salt, child.external_req_id) == (3, "salt", "r") for child in children
    )
    assert parent.sampling_params.n == 3


@pytest.mark.parametrize(("seed", "expected"), [(None, [None] * 3), (MAX_SEED, [MAX_SEED, 0, 1])])
def test_without_a_seed_there_is_none_and_the_largest_is_followed_by_zero(
    seed: int | None, expected: list[int | None]
) -> None:
    parent = request(seed=seed)
    assert parent.sampling_params is not None
    children = make_children(parent, parent.sampling_params)
    assert [child.sampling_params and child.sampling_params.seed for child in children] == expected


def test_an_output_has_the_completions_by_index_and_ends_with_the_last_of_them(harness: Harness) -> None:
    harness.step(EngineCoreOutput(IDS[2], [3], LENGTH), EngineCoreOutput(IDS[0], [4]))
    first = harness.read()
    assert (first.request_id, first.finished) == ("r", False)
    assert [(c.index, c.token_ids, c.finish_reason) for c in first.outputs] == [
        (0, [4], None),
        (2, [3], "length"),
    ]
    harness.step(EngineCoreOutput(IDS[1], [5], LENGTH))
    assert not harness.read().finished
    harness.step(EngineCoreOutput(IDS[0], [6], LENGTH))
    last = harness.read()
    assert last.finished
    assert [(c.index, c.token_ids) for c in last.outputs] == [(0, [6])]


def test_metrics_are_those_of_the_whole_request(harness: Harness) -> None:
    kinds = EngineCoreEventType
    events = [EngineCoreEvent(kinds.QUEUED, 1.0), EngineCoreEvent(kinds.SCHEDULED, 1.5)]
    later = [EngineCoreEvent(kinds.QUEUED, 1.0), EngineCoreEvent(kinds.SCHEDULED, 3.0)]
    preempted = [EngineCoreEvent(kinds.PREEMPTED, 4.0)]
    harness.step(EngineCoreOutput(IDS[0], [3], events=events, num_cached_tokens=16))
    harness.step(EngineCoreOutput(IDS[1], [3, 4], LENGTH, events=later, num_cached_tokens=32))
    partial = harness.read()
    assert partial.num_cached_tokens == 16
    assert partial.metrics.finished_time is None
    harness.step(EngineCoreOutput(IDS[0], [3], LENGTH, events=preempted))
    harness.step(EngineCoreOutput(IDS[2], [3], LENGTH, events=preempted, num_cached_tokens=32))
    last = harness.read()
    assert last.num_cached_tokens == 16
    metrics = last.metrics
    assert (metrics.arrival_time, metrics.queued_time) == (5.0, 0.5)
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (5, 2)
    assert metrics.finished_time is not None
    assert metrics.finished_time >= (metrics.first_token_time or 0)


@pytest.mark.parametrize("name", ["r", "r-1"])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_an_abort_ends_every_completion_that_still_runs(
    byte_level: Tokenizer, name: str, kind: RequestOutputKind
) -> None:
    harness = Harness(byte_level, kind)
    harness.step(EngineCoreOutput(IDS[1], [3], LENGTH), EngineCoreOutput(IDS[2], [4]))
    assert harness.processor.abort_requests([name]) == [IDS[0], IDS[2]]
    output = harness.read()
    assert output.finished
    assert [(c.token_ids, c.finish_reason) for c in output.outputs] == [
        ([], "abort"),
        ([3], "length"),
        ([4], "abort"),
    ]
    assert harness.processor.abort_requests([name]) == []


def test_one_completion_can_be_aborted_alone(harness: Harness) -> None:
    assert harness.processor.abort_requests([IDS[1]]) == [IDS[1]]
    output = harness.read()
    assert [(c.index, c.finish_reason) for c in output.outputs] == [(1, "abort")]
    assert not output.finished
    assert set(harness.processor.request_states) == {IDS[0], IDS[2]}


def test_a_completion_that_the_engine_refuses_ends_the_others_with_one_error(harness: Harness) -> None:
    result = harness.step(
        EngineCoreOutput(IDS[0], [3], LENGTH),
        EngineCoreOutput(IDS[1], [], ERROR, error="no room"),
        EngineCoreOutput(IDS[2], [], ERROR, error="no room"),
    )
    assert result.reqs_to_abort == [IDS[2]]
    harness.read()
    with pytest.raises(RequestError, match="request r: no room"):
        harness.read()
    assert harness.processor.get_num_unfinished_requests() == 0


def test_without_a_collector_a_step_returns_one_output_of_all_that_changed(byte_level: Tokenizer) -> None:
    for kind, sizes in ((DELTA, [1, 1]), (CUMULATIVE, [1, 2])):
        harness = Harness(byte_level, kind, queued=False)
        seen = []
        for _ in range(2):
            (output,) = harness.step(*(EngineCoreOutput(name, [3]) for name in IDS)).request_outputs
            assert [completion.index for completion in output.outputs] == [0, 1, 2]
            seen.append(len(output.outputs[1].token_ids))
        assert seen == sizes
        result = harness.step(EngineCoreOutput(IDS[1], [], ERROR, error="no"))
        assert [str(error) for error in result.errors] == ["request r: no"]
        assert set(result.reqs_to_abort) == {IDS[0], IDS[2]}


def test_a_request_that_could_not_be_sent_leaves_nothing(harness: Harness) -> None:
    assert harness.processor.discard_request("r-1") == IDS
    assert harness.queue.get_nowait() is None
    assert not harness.processor.request_states
    assert not harness.processor._groups


def test_an_internal_id_is_not_given_twice_while_a_completion_runs(harness: Harness) -> None:
    with pytest.raises(InvalidArgumentError, match="request_id"):
        harness.processor.add_request(request(), None)
    harness.processor.abort_requests(["r-1"])
    harness.processor.add_request(request(), None)


@pytest.fixture
def only_new_objects() -> None:
    """Look at no object that is there already: with all that is imported, each look would take a second."""
    gc.freeze()


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("end", ["finished", "stop string", "aborted", "refused", "engine dead"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_has_ended_leaves_nothing_behind(byte_level: Tokenizer, n: int, end: str) -> None:
    processor = OutputProcessor(TextDecoding(byte_level))
    before = num_living()
    queue = RequestOutputCollector(DELTA, "r", "r-1")
    names = [
        child.request_id for child in processor.add_request(request(n=n, stop=["x"], logprobs=1), "p", queue)
    ]
    assert num_living() > before
    if end == "aborted":
        processor.abort_requests(["r"])
    elif end == "engine dead":
        processor.fail_requests(RequestError("dead"))
    else:
        token_ids = byte_level.encode("ax").ids
        reason = {"finished": LENGTH, "stop string": None, "refused": ERROR}[end]
        processor.process_outputs([EngineCoreOutput(name, token_ids, reason) for name in names])
    assert processor.get_num_unfinished_requests() == 0
    del queue
    assert num_living() == before
    assert not processor._groups


def num_living() -> int:
    """Count the objects that belong to a request."""
    gc.collect()
    kinds = (RequestState, ParentRequest, IncrementalDetokenizer, LogprobsProcessor, RequestOutputCollector)
    return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())
