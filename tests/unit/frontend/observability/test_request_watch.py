"""Observers hear of each request once, when it has ended, with all that is known of it."""

from __future__ import annotations

import time

import pytest
from tokenizers import Tokenizer

from nbengine.errors import EngineDeadError
from nbengine.frontend.observability.request_log import RequestLog
from nbengine.frontend.observability.request_watch import RequestRecord
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.ipc.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from nbengine.outputs import RequestMetrics
from nbengine.sampling_params import PoolingParams, SamplingParams


class Notes:
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def ended(self, record: RequestRecord) -> None:
        self.records.append(record)


class Broken:
    def ended(self, record: RequestRecord) -> None:
        raise ValueError(record.request_id)


class Rig:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.processor = OutputProcessor(TextDecoding(tokenizer))
        self.notes = Notes()
        self.processor.watch.observers.append(self.notes)
        self.tokens = tokenizer.encode("the quick brown fox").ids

    def add(self, name: str = "r", headers: dict[str, str] | None = None, **params) -> RequestOutputCollector:
        made = SamplingParams(**params)
        request = EngineCoreRequest(
            f"{name}-1", [1, 2, 3], made, arrival_time=time.monotonic(), external_req_id=name
        )
        queue = RequestOutputCollector(made.output_kind, name, request.request_id)
        queue.trace_headers = headers
        self.processor.add_request(request, "the prompt", queue)
        return queue

    def feed(self, request_id: str, token_ids: list[int], finish: FinishReason | None = None, **fields):
        output = EngineCoreOutput(request_id, token_ids, finish_reason=finish, **fields)
        return self.processor.process_outputs([output], rank=1)


@pytest.fixture
def rig(byte_level: Tokenizer) -> Rig:
    return Rig(byte_level)


def test_a_record_has_what_was_asked_and_what_came(rig: Rig) -> None:
    headers = {"traceparent": "00-1-2-01"}
    rig.add("mine", headers, max_tokens=2, temperature=0.5)
    events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 5.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 5.5),
    ]
    rig.feed("mine-1", rig.tokens[:1], events=events, num_cached_tokens=2)
    assert rig.notes.records == []
    rig.feed("mine-1", rig.tokens[1:2], FinishReason.LENGTH)
    (record,) = rig.notes.records
    assert (record.request_id, record.engine_request_id, record.prompt) == ("mine", "mine-1", "the prompt")
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (3, 2)
    assert (record.finish_reasons, record.error, record.trace_headers) == (["length"], None, headers)
    assert (record.params.temperature, record.metrics.queued_time) == (0.5, 0.5)
    assert record.metrics.num_generation_tokens == 2
    assert record.metrics.finished_time is not None
    assert record.metrics.data_parallel_ranks == (1,)
    assert not rig.processor.watch._records


def test_completions_are_one_request_that_ends_with_the_last(rig: Rig) -> None:
    rig.add("r", n=3, max_tokens=1)
    rig.feed("1_r-1", rig.tokens[:1], FinishReason.LENGTH)
    rig.feed("0_r-1", rig.tokens[:1], FinishReason.STOP)
    assert rig.notes.records == []
    rig.feed("2_r-1", rig.tokens[:1], FinishReason.LENGTH)
    (record,) = rig.notes.records
    assert record.finish_reasons == ["length", "stop", "length"]
    assert record.metrics.num_generation_tokens == 3


def test_a_stop_string_is_a_stop_and_an_abort_an_abort(rig: Rig) -> None:
    rig.add("stops", stop=["quick"])
    processed = rig.feed("stops-1", rig.tokens)
    assert processed.reqs_to_abort == ["stops-1"]
    rig.add("aborts")
    rig.processor.abort_requests(["aborts"])
    assert [(r.request_id, r.finish_reasons) for r in rig.notes.records] == [
        ("stops", ["stop"]),
        ("aborts", ["abort"]),
    ]


def test_a_refusal_and_a_dead_engine_are_errors(rig: Rig) -> None:
    rig.add("refused", n=2)
    rig.feed("0_refused-1", [], FinishReason.ERROR, error="too long")
    rig.add("lost")
    rig.processor.fail_requests(EngineDeadError("the engine has ended"))
    refused, lost = rig.notes.records
    assert "too long" in refused.error
    assert (lost.request_id, lost.finish_reasons) == ("lost", [])
    assert "the engine has ended" in lost.error
    assert lost.metrics.finished_time is not None
    assert not rig.processor.watch._records


def test_pooling_requests_are_told_of_as_well(rig: Rig) -> None:
    pooling = rig.processor.pooling
    for name in ("made", "refused", "aborts", "never sent", "lost"):
        params = PoolingParams(task="embed")
        pooling.add(EngineCoreRequest(f"{name}-1", [1, 2], None, params, external_req_id=name), "text")
    rig.feed("made-1", [], FinishReason.STOP, pooling_output=[1.0], num_cached_tokens=1)
    rig.feed("refused-1", [], FinishReason.ERROR, error="too long")
    pooling.abort(["aborts"])
    pooling.discard("never sent-1")
    pooling.fail(EngineDeadError("the engine has ended"))
    told = [(r.request_id, r.finish_reasons, r.error is None) for r in rig.notes.records]
    assert told == [
        ("made", ["stop"], True),
        ("refused", [], False),
        ("aborts", ["abort"], True),
        ("lost", [], False),
    ]
    assert all(r.metrics.finished_time is not None for r in rig.notes.records)
    made = rig.notes.records[0]
    assert (made.prompt, made.num_prompt_tokens, made.num_cached_tokens) == ("text", 2, 1)
    assert RequestLog().line(made).startswith("request made: 2 prompt tokens (1 cached), task embed, stop, ")
    assert not rig.processor.watch._records


def test_a_request_that_was_never_sent_is_nobodys_business(rig: Rig) -> None:
    rig.add("r", n=2)
    rig.processor.discard_request("r-1")
    assert rig.notes.records == []
    assert not rig.processor.watch._records


def test_without_observers_nothing_is_recorded(rig: Rig) -> None:
    rig.processor.watch.observers.clear()
    rig.add("r", max_tokens=1)
    assert not rig.processor.watch._records
    rig.processor.watch.observers.append(rig.notes)
    rig.feed("r-1", rig.tokens[:1], FinishReason.LENGTH)
    assert rig.notes.records == [], "it began before there was anybody"


def test_an_observer_that_fails_is_logged_and_the_others_are_told(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.processor.watch.observers.insert(0, Broken())
    queue = rig.add("r", max_tokens=1)
    rig.feed("r-1", rig.tokens[:1], FinishReason.LENGTH)
    assert len(rig.notes.records) == 1
    assert queue.get_nowait().finished
    assert "an observer of requests failed at request 'r'" in caplog.text


def record(**fields) -> RequestRecord:
    metrics = RequestMetrics(
        100.0,
        queued_time=0.25,
        first_token_time=100.5,
        finished_time=102.0,
        num_generation_tokens=1234,
        num_preemptions=2,
    )
    given = {"finish_reasons": ["stop"], "num_cached_tokens": 4} | fields
    params = SamplingParams(temperature=0.7, max_tokens=99)
    return RequestRecord("cmpl-7", "cmpl-7-ab", "a secret\nprompt", 12, params, metrics, **given)


def test_a_line_has_figures_and_no_prompt_unless_asked() -> None:
    line = RequestLog().line(record())
    assert line == (
        "request cmpl-7: 12 prompt tokens (4 cached), 1,234 tokens, temperature=0.7 max_tokens=99, stop, "
        "waited 0.250 s, first token after 0.500 s, 2.000 s in all, preempted 2 times"
    )
    assert "secret" not in RequestLog().line(record(error="no room"))
    assert RequestLog(prompts=True).line(record()).endswith(r"prompt 'a secret\nprompt'")
    assert RequestLog(prompts=True, max_chars=3).line(record()).endswith("prompt 'a s' and 12 characters")


def test_a_line_says_how_completions_ended_or_why_there_is_no_result() -> None:
    assert ", 2 stop and 1 length, " in RequestLog().line(record(finish_reasons=["stop", "length", "stop"]))
    assert "failed: " in RequestLog().line(record(error="no room\nat all"))
    assert "\n" not in RequestLog().line(record(error="no room\nat all"))


def test_requests_are_logged_at_level_info(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nbengine")
    rig.processor.watch.observers[:] = [RequestLog()]
    rig.add("r", max_tokens=1)
    rig.feed("r-1", rig.tokens[:1], FinishReason.LENGTH)
    (line,) = [
        r.getMessage() for r in caplog.records if r.name == "nbengine.frontend.observability.request_log"
    ]
    assert line.startswith("request r: 3 prompt tokens, 1 tokens, temperature=1 max_tokens=1, length")
