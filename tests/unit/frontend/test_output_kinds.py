"""Deltas, cumulative and final outputs say the same, whatever the pattern of steps, intervals and reads."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, LogprobsLists
from nbengine.outputs import CompletionOutput, RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams
from tests.unit.frontend.stop_reference import first_stop

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPT_IDS = [1, 2, 3]
WORDS = ["the", " quick", " fox", " ", "é", "京", "🙂", "o", "\n", "café"]
STOPS: list[list[str]] = [[], ["o"], ["fox", " the", "fo"], ["x ", "é", "京"], ["🙂o", "never there"]]

options_of_requests = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "stop": st.sampled_from(STOPS),
        "include_stop_str_in_output": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, 1]),
    }
)
seeds = st.integers(0, 2**32)


class Completion:
    """One completion as an engine sends it: its tokens, their log probabilities, its end."""

    def __init__(self, tokenizer: Tokenizer, options: dict[str, Any], index: int, seed: int) -> None:
        rng = random.Random(f"{seed} {index}")
        self.index = index
        self.ids = tokenizer.encode("".join(rng.choices(WORDS, k=rng.randint(1, 12)))).ids
        self.finish = rng.choice((FinishReason.STOP, FinishReason.LENGTH))
        self.rows = made_up_rows(self.ids, options["logprobs"] or 0, rng)
        self._sends_rows = options["logprobs"] is not None
        self._sends_prompt_rows = options["prompt_logprobs"] is not None and index == 0
        self._prompt_rows = made_up_rows(PROMPT_IDS[1:], 1, rng)
        self._sent = 0

    @property
    def done(self) -> bool:
        return self._sent == len(self.ids)

    def output(self, request_id: str, size: int) -> EngineCoreOutput:
        """The next `size` tokens."""
        part = slice(self._sent, min(self._sent + size, len(self.ids)))
        output = EngineCoreOutput(request_id, self.ids[part], num_cached_tokens=16 * self.index)
        if self._sends_rows:
            rows = self.rows
            output.new_logprobs = LogprobsLists(
                rows.logprob_token_ids[part], rows.logprobs[part], rows.sampled_token_ranks[part]
            )
        if self._sends_prompt_rows and not self._sent:
            output.new_prompt_logprobs = self._prompt_rows
        self._sent = part.stop
        output.finish_reason = self.finish if self.done else None
        return output

    def expected(self, tokenizer: Tokenizer, options: dict[str, Any]) -> tuple[Any, ...]:
        """Return text, token ids, finish and stop reason, and cumulative log probability, by definition."""
        include = options["include_stop_str_in_output"]
        shown = self.ids[:-1] if self.finish is FinishReason.STOP and not include else self.ids
        text = tokenizer.decode(shown)
        stop = first_stop(text, options["stop"])
        ids, finish, reason = self.ids, str(self.finish), None
        if stop is not None:
            reason, start = stop
            end = start + len(reason)
            kept = next(k for k in range(len(ids) + 1) if shown_length(tokenizer, ids, k) >= end)
            ids, text, finish = ids[:kept], text[: end if include else start], "stop"
        total = sum(row[0] for row in self.rows.logprobs[: len(ids)]) if self._sends_rows else None
        return text, ids, finish, reason, pytest.approx(total)


def made_up_rows(token_ids: list[int], count: int, rng: random.Random) -> LogprobsLists:
    return LogprobsLists(
        [[token_id, *rng.sample(range(100), count)] for token_id in token_ids],
        [[-rng.random() for _ in range(count + 1)] for _ in token_ids],
        [rng.randint(1, 50) for _ in token_ids],
    )


def shown_length(tokenizer: Tokenizer, ids: list[int], count: int) -> int:
    """Count the characters that are known after `count` tokens; -1 while the last one is incomplete.

    Its token says nothing until the one that completes it, or the end.
    """
    text = tokenizer.decode(ids[:count])
    return -1 if text.endswith("\ufffd") and count < len(ids) else len(text)


def outputs_of(
    tokenizer: Tokenizer,
    kind: RequestOutputKind,
    options: dict[str, Any],
    seed: int,
    pattern: random.Random,
    *,
    has_reader: bool = True,
) -> list[RequestOutput]:
    """Return what a reader gets, or without one what is returned; `pattern` makes steps, interval and
    reads."""
    processor = OutputProcessor(TextDecoding(tokenizer), stream_interval=pattern.choice((1, 1, 3)))
    params = SamplingParams(output_kind=kind, **options)
    request = EngineCoreRequest("r-1", PROMPT_IDS, params, external_req_id="r")
    queue = RequestOutputCollector(kind, "r", "r-1") if has_reader else None
    children = [child.request_id for child in processor.add_request(request, "the prompt", queue)]
    left = {name: Completion(tokenizer, options, index, seed) for index, name in enumerate(children)}
    outputs = []
    while left:
        running = [name for name in left if pattern.random() < 0.6]
        batch = [left[name].output(name, pattern.choice((1, 1, 2, 5))) for name in running]
        left = {name: completion for name, completion in left.items() if not completion.done}
        outputs += processor.process_outputs(batch).request_outputs
        if pattern.random() < 0.5:
            outputs += read(queue, outputs)
    outputs += read(queue, outputs)
    assert not processor.request_states
    assert not processor._groups
    return outputs


def read(queue: RequestOutputCollector | None, outputs: list[RequestOutput]) -> list[RequestOutput]:
    if queue is None or (outputs and outputs[-1].finished):
        return []
    output = queue.get_nowait()
    return [] if output is None else [output]


def joined_deltas(outputs: list[RequestOutput], index: int) -> CompletionOutput:
    """The definition of what the deltas of one completion say together."""
    parts = [completion for output in outputs for completion in output.outputs if completion.index == index]
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    last = parts[-1]
    return CompletionOutput(
        index,
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        last.cumulative_logprob,
        logprobs if last.logprobs is not None else None,
        last.finish_reason,
        last.stop_reason,
    )


STOP_BEFORE_HALF_A_CHARACTER = {
    "n": 1,
    "stop": ["x ", "é", "京"],
    "include_stop_str_in_output": False,
    "logprobs": None,
    "prompt_logprobs": None,
}


@given(options=options_of_requests, seed=seeds, patterns=st.randoms(use_true_random=False))
@example(options=STOP_BEFORE_HALF_A_CHARACTER, seed=142069, patterns=random.Random(0))
def test_every_kind_comes_to_the_same_end_whatever_the_pattern(
    byte_level: Tokenizer, options: dict[str, Any], seed: int, patterns: random.Random
) -> None:
    (final,) = outputs_of(byte_level, FINAL_ONLY, options, seed, patterns, has_reader=patterns.random() < 0.5)
    deltas = outputs_of(byte_level, DELTA, options, seed, patterns, has_reader=patterns.random() < 0.5)
    cumulative = outputs_of(
        byte_level, CUMULATIVE, options, seed, patterns, has_reader=patterns.random() < 0.5
    )
    assert final.finished
    assert cumulative[-1].outputs == final.outputs
    assert [joined_deltas(deltas, index) for index in range(options["n"])] == final.outputs
    for completion in final.outputs:
        sent = Completion(byte_level, options, completion.index, seed)
        assert (
            completion.text,
            completion.token_ids,
            completion.finish_reason,
            completion.stop_reason,
            completion.cumulative_logprob,
        ) == sent.expected(byte_level, options)
        if options["logprobs"] is not None:
            assert completion.logprobs is not None
            assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
    prompt_logprobs = [output.prompt_logprobs for output in deltas if output.prompt_logprobs is not None]
    if options["prompt_logprobs"] is None:
        assert prompt_logprobs == []
        assert final.prompt_logprobs is None
    else:
        assert prompt_logprobs == [final.prompt_logprobs] == [cumulative[-1].prompt_logprobs]
        assert final.prompt_logprobs is not None
        assert [entry and next(iter(entry)) for entry in final.prompt_logprobs] == [None, 2, 3]


@given(options=options_of_requests, seed=seeds, patterns=st.randoms(use_true_random=False))
def test_cumulative_outputs_only_grow_and_end_together(
    byte_level: Tokenizer, options: dict[str, Any], seed: int, patterns: random.Random
) -> None:
    outputs = outputs_of(byte_level, CUMULATIVE, options, seed, patterns)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [completion.index for completion in outputs[-1].outputs] == list(range(options["n"]))
    for index in range(options["n"]):
        seen = [c for output in outputs for c in output.outputs if c.index == index]
        for before, after in itertools.pairwise(seen):
            assert after.text.startswith(before.text)
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            if before.logprobs is not None:
                assert after.logprobs is not None
                assert len(before.logprobs) == len(before.token_ids)
                assert after.logprobs[: len(before.logprobs)] == before.logprobs
            assert before.finish_reason is None or after == before


def test_a_reader_that_never_reads_costs_as_much_as_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the quick brown fox ").ids * 400
    for kind in (CUMULATIVE, DELTA):
        processor = OutputProcessor(TextDecoding(byte_level))
        queue = RequestOutputCollector(kind, "r", "r-1")
        processor.add_request(EngineCoreRequest("r-1", [1], SamplingParams(output_kind=kind)), None, queue)
        for token_id in ids:
            processor.process_outputs([EngineCoreOutput("r-1", [token_id])])
            assert len(queue._parts) <= 64
        output = queue.get_nowait()
        assert output is not None
        assert output.outputs[0].token_ids == ids
        assert output.outputs[0].text == byte_level.decode(ids)
