"""Answers that go on from their middle: the frontend's part of it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.requests.continuation import Continuation, continued
from nbengine.frontend.requests.input_processor import InputProcessor
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, LogprobsLists
from nbengine.outputs import RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

TEXT = "žluť 日本 👾!"
EOS = 0


class Answer:
    """A request whose answer goes on behind `written`, and what its caller gets."""

    def __init__(self, tokenizer: Tokenizer, written: list[int], **params: Any) -> None:
        whole = SamplingParams(output_kind=RequestOutputKind.DELTA, **params)
        whole.eos_token_id = EOS
        request = EngineCoreRequest("r-1", [1, 2], whole, external_req_id="r")
        continuation = continued(request, written)
        self.queue = RequestOutputCollector(RequestOutputKind.DELTA, "r", "r-1")
        self.processor = OutputProcessor(TextDecoding(tokenizer))
        self.sent = self.processor.add_request(request, None, self.queue, continuation)

    def emit(
        self,
        token_ids: list[int],
        reason: FinishReason | None = None,
        logprobs: LogprobsLists | None = None,
    ) -> RequestOutput | None:
        """Let tokens come in that the engine core has sampled."""
        output = EngineCoreOutput("r-1", token_ids, finish_reason=reason, new_logprobs=logprobs)
        self.aborted = self.processor.process_outputs([output]).reqs_to_abort
        return self.queue.get_nowait()


def test_the_text_is_that_of_the_whole_answer_wherever_it_was_cut(byte_level: Tokenizer) -> None:
    """Also within a character, whose bytes are tokens."""
    ids = byte_level.encode(TEXT).ids
    assert len(ids) > len(TEXT)
    for cut in range(1, len(ids)):
        answer = Answer(byte_level, ids[:cut], max_tokens=100)
        assert len(answer.sent) == 1
        parts = [answer.emit([token_id]) for token_id in ids[cut:-1]]
        parts.append(answer.emit(ids[-1:], FinishReason.LENGTH))
        outputs = [part.outputs[0] for part in parts if part is not None]
        assert "".join(output.text for output in outputs) == TEXT
        assert [token_id for output in outputs for token_id in output.token_ids] == ids[cut:]
        assert outputs[-1].finish_reason == "length"


def test_a_stop_string_may_begin_in_what_is_written(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one! two").ids
    answer = Answer(byte_level, byte_level.encode("one!").ids, max_tokens=100, stop=["! t"])
    end = None
    for token_id in ids[len(byte_level.encode("one!").ids) :]:
        part = answer.emit([token_id])
        if part is not None and part.finished:
            end = part
            break
    assert end is not None
    assert (end.outputs[0].finish_reason, end.outputs[0].stop_reason) == ("stop", "! t")
    assert answer.aborted == ["r-1"]


@pytest.mark.parametrize(
    ("text", "end", "params", "reason", "stop_reason", "shown"),
    [
        ("a fox", [EOS], {}, "stop", None, "a fox"),
        ("a fox", [1], {"stop_token_ids": [1]}, "stop", 1, "a fox"),
        ("a fox.", [], {"stop": ["."]}, "stop", ".", "a fox"),
        ("a fox.", [], {"stop": ["."], "include_stop_str_in_output": True}, "stop", ".", "a fox."),
        ("a fox", [], {"max_tokens": "exactly"}, "length", None, "a fox"),
        ("a fox", [], {"max_tokens": 1}, "length", None, "a fox"),
    ],
)
def test_what_is_written_may_be_the_end(
    byte_level: Tokenizer,
    text: str,
    end: list[int],
    params: dict[str, Any],
    reason: str,
    stop_reason: Any,
    shown: str,
) -> None:
    written = [*byte_level.encode(text).ids, *end]
    if params.get("max_tokens") == "exactly":
        params = {"max_tokens": len(written)}
    answer = Answer(byte_level, written, **{"max_tokens": 100, **params})
    assert answer.sent == []
    assert answer.processor.get_num_unfinished_requests() == 0
    output = answer.queue.get_nowait()
    assert output is not None
    assert output.finished
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == (reason, stop_reason)
    assert (completion.text, completion.token_ids) == (shown, [])


@pytest.mark.parametrize(
    "params", [{"ignore_eos": True}, {"min_tokens": 10}], ids=["the end is ignored", "it comes too early"]
)
def test_an_end_token_that_does_not_count_is_no_end(byte_level: Tokenizer, params: dict[str, Any]) -> None:
    answer = Answer(byte_level, [*byte_level.encode("fox").ids, EOS], max_tokens=100, **params)
    assert len(answer.sent) == 1


def test_a_stop_string_that_came_too_early_to_count_does_not_count_later(byte_level: Tokenizer) -> None:
    written = byte_level.encode("a. fox").ids
    answer = Answer(byte_level, written, max_tokens=100, min_tokens=len(written) + 1, stop=["."])
    assert len(answer.sent) == 1
    part = answer.emit(byte_level.encode("s").ids)
    assert part is not None
    assert (part.outputs[0].text, part.finished) == ("a. foxs", False)


def test_the_first_new_token_has_the_text_of_the_character_it_completes(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🙂").ids
    assert len(ids) > 1
    answer = Answer(byte_level, ids[:-1], max_tokens=100, logprobs=0)
    part = answer.emit(ids[-1:], None, LogprobsLists([[ids[-1]]], [[-0.5]], [1]))
    assert part is not None
    assert part.outputs[0].logprobs is not None
    assert part.outputs[0].logprobs[0][ids[-1]].decoded_token == "🙂"


def made(
    processor: InputProcessor, written: Any, prompt: Any = (5, 6, 7), **params: Any
) -> tuple[Any, Continuation]:
    request = processor.process_inputs("r", list(prompt), SamplingParams(**params))
    continuation = processor.continue_answer(request, written)
    return request, continuation


def test_the_rest_is_as_long_as_the_whole_answer_leaves(input_processor: InputProcessor) -> None:
    request, continuation = made(input_processor, [8, 9], max_tokens=10, min_tokens=5, seed=3)
    assert request.prompt_token_ids == [5, 6, 7, 8, 9]
    assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (8, 3)
    assert request.sampling_params.seed == 3
    assert (continuation.params.max_tokens, continuation.params.min_tokens) == (10, 5)
    request, continuation = made(input_processor, [8] * 61, max_tokens=None)
    assert continuation.end() == (FinishReason.LENGTH, None)
    request, _ = made(input_processor, [8] * 60, max_tokens=None)
    assert request.sampling_params.max_tokens == 1


@pytest.mark.parametrize(
    ("written", "params", "message"),
    [
        ([10**6], {}, "written must be token ids in"),
        ([-1], {}, "written must be token ids in"),
        ([8], {"n": 2}, "n must be 1 where an answer goes on from its middle, got 2"),
        ([8], {"structured_outputs": StructuredOutputsParams(regex="x")}, "structured_outputs must be None"),
        ([8], {"prompt_logprobs": 0}, "prompt_logprobs must be None where"),
    ],
)
def test_what_cannot_go_on_is_refused(
    input_processor: InputProcessor, written: list[int], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        made(input_processor, written, **params)


def test_written_holds_token_ids(input_processor: InputProcessor) -> None:
    with pytest.raises(InvalidTypeError, match="written must be a list of token ids"):
        made(input_processor, ["a"])
