"""From engine core outputs to request outputs."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from tokenizers import Tokenizer

from nbengine.errors import EngineDeadError, InvalidArgumentError, RequestError
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
from nbengine.outputs import RequestOutput, joined
from nbengine.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TEXT = "the quick brown fox"


class Harness:
    """An output processor, and requests whose tokens spell `TEXT`."""

    def __init__(self, tokenizer: Tokenizer, stream_interval: int = 1) -> None:
        self.processor = OutputProcessor(TextDecoding(tokenizer), stream_interval=stream_interval)
        self.ids = tokenizer.encode(TEXT).ids
        self._numbers = itertools.count()

    def add(
        self, *, queued: bool = False, external: str = "r", params: SamplingParams | None = None
    ) -> tuple[str, RequestOutputCollector | None]:
        request_id = f"{external}-{next(self._numbers):08x}"
        params = params or SamplingParams()
        request = EngineCoreRequest(
            request_id, [1, 2], params, arrival_time=time.monotonic(), external_req_id=external
        )
        queue = RequestOutputCollector(params.output_kind, external, request_id) if queued else None
        self.processor.add_request(request, "the prompt", queue)
        return request_id, queue

    def run(self, request_id: str, finish: FinishReason = FinishReason.LENGTH) -> list[RequestOutput]:
        """Feed the tokens one by one and return the outputs."""
        outputs = []
        for index, token_id in enumerate(self.ids):
            reason = finish if index == len(self.ids) - 1 else None
            step = EngineCoreOutput(request_id, [token_id], finish_reason=reason)
            outputs += self.processor.process_outputs([step]).request_outputs
        return outputs


@pytest.fixture
def harness(byte_level: Tokenizer) -> Harness:
    return Harness(byte_level)


def test_cumulative_outputs_carry_everything_so_far(harness: Harness) -> None:
    request_id, _ = harness.add()
    outputs = harness.run(request_id)
    assert len(outputs) == len(harness.ids)
    for index, output in enumerate(outputs):
        assert output.outputs[0].token_ids == harness.ids[: index + 1]
        assert TEXT.startswith(output.outputs[0].text)
    last = outputs[-1]
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", "the prompt", [1, 2])
    assert (last.outputs[0].text, last.outputs[0].finish_reason, last.finished) == (TEXT, "length", True)
    assert not any(output.finished for output in outputs[:-1])


def test_deltas_join_to_the_whole(harness: Harness) -> None:
    request_id, _ = harness.add(params=SamplingParams(output_kind=DELTA))
    outputs = harness.run(request_id)
    assert "".join(output.outputs[0].text for output in outputs) == TEXT
    assert [token for output in outputs for token in output.outputs[0].token_ids] == harness.ids


def test_final_only_gives_one_output(harness: Harness) -> None:
    request_id, _ = harness.add(params=SamplingParams(output_kind=FINAL_ONLY))
    (output,) = harness.run(request_id, FinishReason.STOP)
    assert output.outputs[0].token_ids == harness.ids
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_a_stream_interval_gives_the_first_token_at_once_then_one_output_an_interval(
    byte_level: Tokenizer, kind: RequestOutputKind
) -> None:
    harness = Harness(byte_level, stream_interval=4)
    request_id, _ = harness.add(params=SamplingParams(output_kind=kind))
    outputs = harness.run(request_id)
    sizes = [len(output.outputs[0].token_ids) for output in outputs]
    total = len(harness.ids)
    if kind is DELTA:
        assert sizes == [1, *[4] * ((total - 1) // 4), *([(total - 1) % 4] if (total - 1) % 4 else [])]
        assert "".join(output.outputs[0].text for output in outputs) == TEXT
    else:
        assert sizes == sorted({*range(1, total + 1, 4), total})


def test_a_stop_string_ends_the_request_here_and_names_it_for_the_engine_core(harness: Harness) -> None:
    request_id, _ = harness.add(params=SamplingParams(stop=[" brown"]))
    results = [
        harness.processor.process_outputs([EngineCoreOutput(request_id, [token_id])])
        for token_id in harness.ids
    ]
    outputs = [output for result in results for output in result.request_outputs]
    assert [ids for result in results for ids in result.reqs_to_abort] == [request_id]
    completion = outputs[-1].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "the quick",
        "stop",
        " brown",
    )
    assert not harness.processor.request_states


def test_a_stop_string_in_the_last_token_needs_no_abort(harness: Harness) -> None:
    request_id, _ = harness.add(params=SamplingParams(stop=["fox"]))
    step = EngineCoreOutput(request_id, harness.ids, finish_reason=FinishReason.LENGTH)
    result = harness.processor.process_outputs([step])
    assert result.reqs_to_abort == []
    assert result.request_outputs[0].outputs[0].finish_reason == "stop"


def test_a_stop_token_is_the_stop_reason(harness: Harness) -> None:
    request_id, _ = harness.add()
    step = EngineCoreOutput(
        request_id, harness.ids, finish_reason=FinishReason.STOP, stop_reason=harness.ids[-1]
    )
    (output,) = harness.processor.process_outputs([step]).request_outputs
    assert output.outputs[0].stop_reason == harness.ids[-1]


def test_outputs_go_to_the_collector_of_their_request(harness: Harness) -> None:
    first, first_queue = harness.add(queued=True)
    second, second_queue = harness.add(queued=True)
    result = harness.processor.process_outputs(
        [EngineCoreOutput(first, harness.ids[:1]), EngineCoreOutput(second, harness.ids[:2])]
    )
    assert result.request_outputs == []
    assert first_queue is not None
    assert second_queue is not None
    assert first_queue.get_blocking(0).outputs[0].token_ids == harness.ids[:1]
    assert second_queue.get_blocking(0).outputs[0].token_ids == harness.ids[:2]


def test_an_abort_ends_the_stream_with_the_text_there_is(harness: Harness) -> None:
    request_id, queue = harness.add(queued=True, params=SamplingParams(stop=["qux"]))
    harness.processor.process_outputs([EngineCoreOutput(request_id, harness.ids[:3])])
    assert harness.processor.abort_requests([request_id]) == [request_id]
    assert queue is not None
    output = queue.get_blocking(0)
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert TEXT.startswith(output.outputs[0].text)
    assert output.outputs[0].token_ids == harness.ids[:3]
    late = harness.processor.process_outputs([EngineCoreOutput(request_id, harness.ids[3:])])
    assert late.request_outputs == []


def test_an_external_id_aborts_all_its_requests(harness: Harness) -> None:
    twins = {harness.add(external="twin", queued=True)[0] for _ in range(2)}
    other, _ = harness.add(external="other", queued=True)
    assert set(harness.processor.abort_requests(["twin", "unknown"])) == twins
    assert set(harness.processor.request_states) == {other}


def test_a_refused_request_fails_alone(harness: Harness) -> None:
    refused, refused_queue = harness.add(queued=True, external="bad")
    fine, _ = harness.add(external="good")
    result = harness.processor.process_outputs(
        [
            EngineCoreOutput(refused, [], finish_reason=FinishReason.ERROR, error="too long"),
            EngineCoreOutput(fine, harness.ids[:1]),
        ]
    )
    assert [output.request_id for output in result.request_outputs] == ["good"]
    assert refused_queue is not None
    with pytest.raises(RequestError, match="bad: too long"):
        refused_queue.get_nowait()
    assert set(harness.processor.request_states) == {fine}


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_what_was_computed_before_an_error_comes_before_it(
    byte_level: Tokenizer, kind: RequestOutputKind
) -> None:
    # The last tokens and the text that may begin a stop string are waiting when the error comes.
    harness = Harness(byte_level, stream_interval=100)
    params = SamplingParams(output_kind=kind, stop=[TEXT[-3:] + "!"])
    _, queue = harness.add(queued=True, params=params)
    _, other = harness.add(queued=True, params=params)
    ids, polled = harness.ids, harness.add(params=params)[0]
    assert queue is not None
    assert other is not None
    harness.processor.process_outputs([EngineCoreOutput(queue.engine_request_id, ids[:2])])
    parts = [] if kind is FINAL_ONLY else [queue.get_blocking(0)]
    result = harness.processor.process_outputs(
        [
            EngineCoreOutput(queue.engine_request_id, ids[2:], finish_reason=FinishReason.ERROR, error="NaN"),
            EngineCoreOutput(other.engine_request_id, [], finish_reason=FinishReason.ERROR, error="NaN"),
            EngineCoreOutput(polled, ids, finish_reason=FinishReason.ERROR, error="NaN"),
        ]
    )
    if kind is not FINAL_ONLY:
        parts.append(queue.get_blocking(0))
        assert [output.outputs[0].text for output in result.request_outputs] == [TEXT]
        assert not any(output.finished or output.outputs[0].finished for output in parts)
        whole = parts[-1] if kind is CUMULATIVE else joined(parts)
        assert (whole.outputs[0].text, whole.outputs[0].token_ids) == (TEXT, ids)
        assert whole.metrics.num_generation_tokens == len(ids)
    assert len(result.errors) == 1
    for failed in (queue, other):
        with pytest.raises(RequestError, match="NaN"):
            failed.get_nowait()
    assert not harness.processor.request_states


def test_a_stop_string_before_an_error_is_the_end(harness: Harness) -> None:
    request_id, _ = harness.add(params=SamplingParams(stop=["brown"]))
    step = EngineCoreOutput(request_id, harness.ids, finish_reason=FinishReason.ERROR, error="NaN")
    result = harness.processor.process_outputs([step])
    assert result.errors == []
    assert [output.outputs[0].stop_reason for output in result.request_outputs] == ["brown"]


def test_a_refused_request_without_a_collector_is_returned_as_an_error(harness: Harness) -> None:
    request_id, _ = harness.add()
    step = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error="no")
    result = harness.processor.process_outputs([step])
    assert [str(error) for error in result.errors] == ["request r: no"]


def test_the_end_of_the_engine_reaches_every_collector(harness: Harness) -> None:
    queues = [harness.add(queued=True)[1] for _ in range(3)]
    harness.processor.fail_requests(EngineDeadError("killed"))
    for queue in queues:
        assert queue is not None
        with pytest.raises(EngineDeadError, match="killed"):
            queue.get_nowait()
    assert harness.processor.get_num_unfinished_requests() == 0


def test_metrics_tell_waiting_first_token_and_preemptions(harness: Harness) -> None:
    request_id, _ = harness.add()
    kinds = EngineCoreEventType
    events = [EngineCoreEvent(kinds.QUEUED, 10.0), EngineCoreEvent(kinds.SCHEDULED, 10.5)]
    first = EngineCoreOutput(request_id, harness.ids[:1], events=events, num_cached_tokens=16)
    again = [EngineCoreEvent(kinds.PREEMPTED, 11.0), EngineCoreEvent(kinds.SCHEDULED, 12.0)]
    second = EngineCoreOutput(request_id, harness.ids[1:3], events=again, finish_reason=FinishReason.LENGTH)
    (partial,) = harness.processor.process_outputs([first]).request_outputs
    (final,) = harness.processor.process_outputs([second]).request_outputs
    metrics = final.metrics
    assert partial.num_cached_tokens == final.num_cached_tokens == 16
    assert metrics.queued_time == 0.5
    assert metrics.num_preemptions == 1
    assert metrics.num_generation_tokens == 3
    assert metrics.first_token_time is not None
    assert (
        metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time == metrics.finished_time
    )


def test_outputs_do_not_change_after_they_were_handed_out(harness: Harness) -> None:
    request_id, _ = harness.add()
    outputs = harness.run(request_id)
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, len(harness.ids) + 1))


async def test_an_output_that_cannot_be_processed_leaves_no_reader_of_another_asleep(
    harness: Harness,
) -> None:
    fine, fine_queue = harness.add(queued=True, params=SamplingParams(output_kind=DELTA))
    broken, broken_queue = harness.add(queued=True)
    assert fine_queue is not None
    assert broken_queue is not None
    readers = [asyncio.create_task(queue.get()) for queue in (fine_queue, broken_queue)]
    await asyncio.sleep(0)
    steps = [EngineCoreOutput(fine, harness.ids[:1]), EngineCoreOutput(broken, None)]  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        harness.processor.process_outputs(steps)
    harness.processor.fail_requests(EngineDeadError("a bug"))
    first, second = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 60)
    assert isinstance(first, RequestOutput)
    assert isinstance(second, EngineDeadError)


def test_an_internal_id_is_not_given_twice(harness: Harness) -> None:
    request = EngineCoreRequest("same", [1], SamplingParams(), external_req_id="x")
    harness.processor.add_request(request, None)
    with pytest.raises(InvalidArgumentError, match="request_id"):
        harness.processor.add_request(request, None)


def test_metrics_tell_the_ranks_that_computed_a_request(harness: Harness) -> None:
    request_id, _ = harness.add(params=SamplingParams(n=2))
    queued = EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)
    for rank, name in ((3, f"1_{request_id}"), (1, f"0_{request_id}")):
        first = EngineCoreOutput(name, harness.ids[:1], events=[queued])
        harness.processor.process_outputs([first], rank)
        last = EngineCoreOutput(name, harness.ids[1:2], finish_reason=FinishReason.LENGTH)
        (output,) = harness.processor.process_outputs([last], rank).request_outputs
    assert output.metrics.data_parallel_ranks == (3, 1)
