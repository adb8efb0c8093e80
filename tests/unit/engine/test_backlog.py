"""The backlog of a client that does not read: nothing lost, nothing twice, every byte counted."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.engine.core.backlog import Backlog, EncodedAnswer
from nbengine.ipc.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LogprobsLists,
    PromptRead,
)
from nbengine.metrics.requests import RequestStats
from nbengine.metrics.stats import SchedulerStats
from tests.support.thorough import amount

REASON = "too slow"


def logprobs(tokens: list[int]) -> LogprobsLists:
    return LogprobsLists([[t, t + 1] for t in tokens], [[-0.5, -t] for t in tokens], [1] * len(tokens))


# Made once: to look for a strategy takes as long as to draw from it.
LENGTHS, KINDS, ENDS, COUNTS = st.integers(1, 25), st.integers(0, 5), st.integers(0, 4), st.integers(0, 3)
REQUESTS, GONE = st.lists(st.sampled_from("abc"), unique=True), st.lists(st.sampled_from("xyz"), max_size=1)
YES_OR_NO = st.booleans()


@st.composite
def histories(draw: st.DrawFn) -> list[object]:
    """Batches of outputs of a few requests, with utility answers (integers) among them."""
    items: list[object] = []
    ended: set[str] = set()
    token = 0
    for number in range(draw(LENGTHS)):
        if draw(KINDS) == 0:
            items.append(number)
            continue
        outputs = []
        for request_id in draw(REQUESTS):
            # An id may be used again after its end.
            ended.discard(request_id)
            count = draw(COUNTS)
            tokens = list(range(token, token + count))
            token += count
            output = EngineCoreOutput(request_id, tokens, num_cached_tokens=number)
            if draw(YES_OR_NO):
                output.new_logprobs = logprobs(tokens)
            if draw(YES_OR_NO):
                output.events = [EngineCoreEvent(EngineCoreEventType.QUEUED, float(number))]
            if draw(ENDS) == 0:
                output.finish_reason = FinishReason.STOP
                output.stop_reason = number
                ended.add(request_id)
            outputs.append(output)
        gone = draw(GONE) or None
        read = [PromptRead(name, 100, number, 0, 0.5) for name in draw(GONE)] or None
        items.append(
            EngineCoreOutputs(
                outputs=outputs, timestamp=float(number), finished_requests=gone, prompts_read=read
            )
        )
    return items


class Story:
    """The story that one request's reader sees, whatever the messages were: one entry a life of the id."""

    def __init__(self) -> None:
        self.lives: list[dict[str, object]] = []

    def hear(self, output: EngineCoreOutput) -> None:
        if not self.lives or self.lives[-1]["finish"] is not None:
            self.lives.append(
                {"tokens": [], "events": [], "ids": [], "probs": [], "ranks": [], "finish": None, "cached": 0}
            )
        life = self.lives[-1]
        life["tokens"] += output.new_token_ids
        life["events"] += output.events or []
        if output.new_logprobs is not None:
            life["ids"] += output.new_logprobs.logprob_token_ids
            life["probs"] += output.new_logprobs.logprobs
            life["ranks"] += output.new_logprobs.sampled_token_ranks
        life["finish"] = output.finish_reason
        life["stop"] = output.stop_reason
        life["cached"] = output.num_cached_tokens


def heard(items: list[object]) -> tuple[dict[str, list], list[str], list[int]]:
    stories: defaultdict[str, Story] = defaultdict(Story)
    gone: list[str] = []
    answers: list[int] = []
    for item in items:
        if isinstance(item, EngineCoreOutputs):
            gone += item.finished_requests or []
            for output in item.outputs:
                stories[output.request_id].hear(output)
        else:
            answers.append(item.call_id if isinstance(item, EncodedAnswer) else item)
    return {name: story.lives for name, story in stories.items()}, gone, answers


def fill(backlog: Backlog, items: list[object]) -> None:
    for item in items:
        if isinstance(item, EngineCoreOutputs):
            backlog.add(item)
        else:
            backlog.add_answer(item, [b"answer"])


def drain(backlog: Backlog) -> list[object]:
    popped = []
    while backlog:
        popped.append(backlog.pop())
    return popped


@given(histories())
@settings(max_examples=amount(25, thorough=4000), deadline=None)
def test_every_request_tells_the_same_story_in_fewer_messages(items: list[object]) -> None:
    expected = heard(items)
    backlog = Backlog()
    fill(backlog, items)
    popped = drain(backlog)
    assert heard(popped) == expected
    assert backlog.num_bytes == 0
    num_answers = sum(isinstance(item, int) for item in items)
    assert len(popped) <= 2 * num_answers + 1
    # What went in belongs to others, who must find it as it was.
    assert heard(items) == expected


@given(histories(), histories())
@settings(max_examples=amount(25, thorough=4000), deadline=None)
def test_after_giving_up_no_request_goes_on_with_a_gap(before: list[object], after: list[object]) -> None:
    backlog = Backlog()
    fill(backlog, before)
    lives, _, answers = heard(before)
    assert [answer.call_id for answer in backlog.give_up(REASON)] == answers
    truncated = {name for name, story in lives.items() if story[-1]["finish"] is None}
    ended = {name for name, story in lives.items() if any(life["finish"] is not None for life in story)}
    first = {output.request_id for item in drain(backlog) for output in item.outputs}
    assert first == ended
    fill(backlog, after)
    told, _, _ = heard(drain(backlog))
    for name, story in heard(after)[0].items():
        if name not in truncated:
            assert told.get(name) == story
        elif story[0]["finish"] is None:
            assert name not in told
        else:
            end, *rest = told[name]
            assert (end["tokens"], end["finish"]) == ([], FinishReason.ERROR)
            assert rest == story[1:]


def test_what_a_leaving_core_hands_back_is_merged_and_never_given_up() -> None:
    backlog = Backlog()
    for name in "ab":
        backlog.add(EngineCoreOutputs(outputs=[EngineCoreOutput("r", [1])], returned=[name]))
    before = backlog.num_bytes
    backlog.add(EngineCoreOutputs(returned=["c"]))
    assert backlog.num_bytes > before
    backlog.give_up(REASON)
    (outputs,) = drain(backlog)
    assert outputs.returned == ["a", "b", "c"]
    assert outputs.outputs == []


def test_the_newest_word_on_each_prompt_stays_and_is_counted() -> None:
    backlog = Backlog()
    for number, name in enumerate("abab"):
        backlog.add(EngineCoreOutputs(prompts_read=[PromptRead(name, 9, number, 0, 0.5)]))
        assert backlog.num_bytes >= min(number + 1, 2) * len(name)
    one = backlog.num_bytes
    backlog.add(EngineCoreOutputs(prompts_read=[PromptRead("b", 9, 7, 0, 0.5)]))
    assert backlog.num_bytes == one
    outputs = backlog.pop()
    assert [(read.request_id, read.num_read_tokens) for read in outputs.prompts_read] == [("a", 2), ("b", 7)]
    assert backlog.num_bytes == 0


def test_the_newest_statistics_stay() -> None:
    backlog = Backlog()
    for step in range(3):
        backlog.add(EngineCoreOutputs(scheduler_stats=SchedulerStats(step_counter=step)))
    backlog.add(EngineCoreOutputs(timestamp=9.0))
    merged = backlog.pop()
    assert merged.scheduler_stats.step_counter == 2
    assert merged.timestamp == 9.0


def test_what_requests_have_taken_stays_if_the_newest_statistics_leave_it_out() -> None:
    backlog = Backlog()
    told = [RequestStats(finished=[number, 0, 0, 0]) for number in (1, 2)]
    for step, requests in enumerate([None, told[0], told[1], None]):
        stats = SchedulerStats(step_counter=step, requests=requests)
        backlog.add(EngineCoreOutputs(scheduler_stats=stats))
    assert stats.requests is None, "others may hold it, too"
    merged = backlog.pop()
    assert (merged.scheduler_stats.step_counter, merged.scheduler_stats.requests) == (3, told[1])


def test_prompt_logprobs_and_pooling_output_are_kept() -> None:
    backlog = Backlog()
    array = np.ones(1000, np.float32)
    backlog.add(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [], new_prompt_logprobs=logprobs([1, 2]))]))
    backlog.add(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [3], pooling_output=array)]))
    assert backlog.num_bytes > array.nbytes
    (output,) = backlog.pop().outputs
    assert output.new_prompt_logprobs == logprobs([1, 2])
    assert output.pooling_output is array


def test_the_estimate_is_above_the_memory_that_it_stands_for() -> None:
    for with_logprobs in (False, True):
        tracemalloc.start()
        backlog = Backlog()
        for step in range(300):
            outputs = []
            for number in range(20):
                tokens = [1000 * step + number]
                output = EngineCoreOutput(f"request-{number}", tokens)
                if with_logprobs:
                    ids, values = range(10_000 + step, 10_006 + step), [-0.1 * k - step for k in range(6)]
                    output.new_logprobs = LogprobsLists([list(ids)], [values], [step + 500])
                outputs.append(output)
            backlog.add(EngineCoreOutputs(outputs=outputs, timestamp=float(step)))
        del outputs, output, tokens
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held <= backlog.num_bytes <= 4 * held
