"""Kept tokens become the text that the stream had brought."""

from __future__ import annotations

import random

import msgspec
import pytest
from tokenizers import Tokenizer

from nbengine.client.calls import merged_answers
from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.engine.core.transcripts import TranscriptKeeper
from nbengine.errors import InvalidArgumentError, InvalidTypeError, WireError
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.outputs.parallel_sampling import make_children
from nbengine.frontend.outputs.transcripts import (
    Transcripts,
    completion_of,
    mark,
    transcripts_of,
)
from nbengine.frontend.requests.continuation import continued
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TranscriptMark
from nbengine.ipc.transcripts import (
    MAX_PROMPT_CHARACTERS,
    TranscriptRecord,
    decoding_params,
    pack_tokens,
    shortened,
    unpack_tokens,
)
from nbengine.outputs import CompletionOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams
from nbengine.scheduler.request import Request
from nbengine.scheduler.state import SchedulerState

FINISHES = (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT, None)


def streamed(
    tokenizer: Tokenizer, steps: list[list[int]], params: SamplingParams, finish: FinishReason | None
) -> CompletionOutput:
    """Return the completion of a caller whose request got `steps` from the engine core."""
    processor = OutputProcessor(TextDecoding(tokenizer))
    collector = RequestOutputCollector(RequestOutputKind.CUMULATIVE, "r", "r-1")
    processor.add_request(EngineCoreRequest("r-1", [1], params, external_req_id="r"), None, collector)
    for index, token_ids in enumerate(steps):
        # An abort is the caller's: the engine core says nothing.
        ends = index == len(steps) - 1 and finish is not FinishReason.ABORT
        processor.process_outputs([EngineCoreOutput("r-1", token_ids, finish if ends else None)])
    if finish is FinishReason.ABORT:
        processor.abort_requests(["r-1"])
    output = collector.get_nowait()
    assert output is not None
    return output.outputs[0]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_one_that_went_on_from_the_middle_has_the_text_of_the_whole(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    rng = random.Random(3)
    seen = set()
    for _ in range(200):
        ids = [rng.randrange(min(300, tokenizer.get_vocab_size())) for _ in range(rng.randint(2, 30))]
        cut = rng.randrange(1, len(ids))
        params = SamplingParams(
            max_tokens=1000, stop=rng.choice([[], ["a"], ["s"]]), min_tokens=rng.choice([0, 8])
        )
        engine_request = EngineCoreRequest("r-1", [1, 2], params, external_req_id="r")
        continuation = continued(engine_request, ids[:cut])
        engine_request.transcript = mark(engine_request, "s", "why?", cut)
        processor = OutputProcessor(TextDecoding(tokenizer))
        collector = RequestOutputCollector(RequestOutputKind.CUMULATIVE, "r", "r-1")
        if not processor.add_request(engine_request, None, collector, continuation):
            continue  # its beginning was its end already
        finish = rng.choice((FinishReason.LENGTH, FinishReason.STOP))
        for position in range(cut, len(ids)):
            ends = position == len(ids) - 1
            processor.process_outputs([EngineCoreOutput("r-1", [ids[position]], finish if ends else None)])
        output = collector.get_nowait()
        assert output is not None
        kept = Request.from_engine_core_request(engine_request, None)
        kept.all_token_ids += ids[cut:]
        record = TranscriptKeeper(scheduler_of(kept), 0).transcripts("s")[0]
        record.finish_reason = finish
        assert completion_of(record, TextDecoding(tokenizer)) == output.outputs[0]
        assert record.num_prompt_tokens == 2 + cut
        seen.add(output.outputs[0].stop_reason)
    assert seen == {None, "a", "s"}


def scheduler_of(request: Request) -> SchedulerState:
    """A scheduler that has one request."""
    scheduler = SchedulerState(SchedulerConfig(), CacheConfig(), 64, 1024)
    scheduler.add_request(request)
    return scheduler


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_text_is_the_streams_wherever_it_was_cut(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    rng = random.Random(7)
    seen = set()
    for _ in range(300):
        ids = [rng.randrange(min(300, tokenizer.get_vocab_size())) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(
            stop=rng.choice([[], [], ["a"], ["s", "\ufffd"]]),
            min_tokens=rng.choice([0, 5]),
            max_tokens=None,
            include_stop_str_in_output=rng.random() < 0.5,
            skip_special_tokens=rng.random() < 0.5,
        )
        finish = rng.choice(FINISHES)
        wanted = streamed(tokenizer, [[token] for token in ids], params, finish)
        context = TextDecoding(tokenizer).context_of([1], skip_special_tokens=params.skip_special_tokens)
        record = TranscriptRecord(
            TranscriptMark("s", "", "r-1", 1.0, context=context),
            pack_tokens(ids),
            1,
            decoding_params(params),
            finish,
        )
        found = completion_of(record, TextDecoding(tokenizer))
        assert found == wanted
        seen.add((found.finish_reason, found.stop_reason is None))
    assert seen >= {("length", True), ("abort", True), ("stop", True), ("stop", False), (None, True)}


def test_a_request_without_text_keeps_its_tokens(byte_level: Tokenizer) -> None:
    record = make_record("g", detokenize=False)
    completion = completion_of(record, TextDecoding(byte_level))
    assert (completion.text, completion.token_ids) == ("", [70, 71, 72])


def make_record(
    group: str, index: int = 0, *, submitted: float = 1.0, num: int = 1, **params
) -> TranscriptRecord:
    return TranscriptRecord(
        TranscriptMark("s", f"prompt of {group}", group, submitted, index, num),
        pack_tokens([70, 71, 72]),
        5,
        decoding_params(SamplingParams(**params)),
        FinishReason.LENGTH,
        ended=submitted + 1 + index,
    )


def test_completions_are_put_together_from_all_ranks_and_the_latest_comes_first(
    byte_level: Tokenizer,
) -> None:
    answers = [
        [make_record("a", 1, num=3), make_record("b", submitted=9.0)],
        [make_record("a", 0, num=3), make_record("c", submitted=5.0)],
    ]
    answers[0][1].was_read = True
    # As they are on the wire.
    plain = [msgspec.msgpack.decode(msgspec.msgpack.encode(answer)) for answer in answers]
    found = transcripts_of(merged_answers("transcripts", plain), TextDecoding(byte_level))
    assert [transcript.request_id for transcript in found] == ["b", "c", "a"]
    assert [transcript.was_read for transcript in found] == [True, False, False]
    whole = found[2]
    assert [completion.index for completion in whole.output.outputs] == [0, 1]
    assert (whole.num_missing, whole.ended, whole.submitted, whole.num_prompt_tokens) == (1, 3.0, 1.0, 5)
    assert (whole.prompt, whole.output.prompt, whole.session) == ("prompt of a", "prompt of a", "s")
    assert whole.output.finished


def test_one_that_is_still_written_has_no_end(byte_level: Tokenizer) -> None:
    records = [make_record("a", 0, num=2), make_record("a", 1, num=2)]
    records[1].finish_reason = None
    (found,) = transcripts_of(records, TextDecoding(byte_level))
    assert (found.ended, found.output.finished) == (None, False)
    assert [completion.finish_reason for completion in found.output.outputs] == ["length", None]


def test_answers_of_several_ranks_become_one() -> None:
    assert merged_answers("forget_transcripts", [2, 0, 3]) == 5
    assert merged_answers("transcript_sessions", [{"a": 1, "b": 0}, {"a": 2}]) == {"a": 3, "b": 0}
    with pytest.raises(msgspec.ValidationError):
        merged_answers("transcripts", [[["no mark"]]])
    with pytest.raises(WireError, match="multiple of 4"):
        unpack_tokens(b"12345")


def test_a_mark_has_a_bounded_prompt_that_can_be_sent() -> None:
    request = EngineCoreRequest("7-abcd", [1], SamplingParams(n=3))
    made = mark(request, "s", "x" * 10_000)
    assert (made.session, made.group, made.index, made.num_completions) == ("s", "7-abcd", 0, 3)
    assert made.prompt == "x" * MAX_PROMPT_CHARACTERS + " … (10,000 characters)"
    assert shortened("short") == "short"
    msgspec.msgpack.encode(mark(request, "s", "half a \ud83d pair"))
    with pytest.raises(InvalidTypeError, match=r"transcript.*7"):
        mark(request, "s", 7)


def test_each_completion_has_a_mark_of_its_own() -> None:
    request = EngineCoreRequest("7-abcd", [1], SamplingParams(n=3))
    request.transcript = mark(request, "s", "why?")
    marks = [child.transcript for child in make_children(request, SamplingParams(n=3))]
    assert [made and (made.index, made.group, made.num_completions) for made in marks] == [
        (0, "7-abcd", 3),
        (1, "7-abcd", 3),
        (2, "7-abcd", 3),
    ]
    request.transcript = None
    assert [child.transcript for child in make_children(request, SamplingParams(n=2))] == [None, None]


class NoEngine(Transcripts):
    session = "own"

    async def call_utility(self, method, *args):
        raise AssertionError(f"{method} was called")

    def _submit_utility(self, method, *args):
        raise AssertionError(f"{method} was called")


def test_wrong_arguments_never_reach_the_engine() -> None:
    frontend = NoEngine()
    for call in (
        lambda: frontend.transcripts_blocking(""),
        lambda: frontend.transcripts_blocking(7),
        lambda: frontend.read_transcripts("r-1"),
        lambda: frontend.forget_transcripts_blocking([1]),
        lambda: frontend.forget_transcripts_blocking(session=""),
    ):
        with pytest.raises(InvalidArgumentError, match=r"session|request_ids"):
            call()
