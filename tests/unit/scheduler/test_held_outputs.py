"""Tokens may be held and told together; a scheduler that tells each at once is the oracle of what is told."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, LogprobsLists
from nbengine.scheduler.output import Fault, ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.request import RequestStatus
from nbengine.scheduler.scheduler import Scheduler
from tests.unit.scheduler.short_histories import ABORTED, add

INTERVALS = 0.0, 3.0, 1e9


class Side:
    """A scheduler, with what it has told of each request."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
            CacheConfig(block_size=4),
            num_blocks,
            32,
            clock=lambda: self.now,
        )
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, FinishReason] = {}
        self.numbers: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, interval: float, **params: Any) -> None:
        add(self.scheduler, name, 4, **params).output_interval = interval

    def step(self) -> dict[str, EngineCoreOutput]:
        """Give each request the number of its token; return what was told."""
        return self.answer(self.scheduler.schedule())

    def answer(self, plan: SchedulerOutput) -> dict[str, EngineCoreOutput]:
        names = list(plan.num_scheduled_tokens)
        sampled: list[list[int]] = [[] for _ in names]
        for name, tokens in zip(names, sampled, strict=True):
            if name not in plan.incomplete_req_ids:
                self.numbers[name] += 1
                tokens.append(self.numbers[name])
        return self.hear(self.scheduler.update_from_output(plan, ModelRunnerOutput(names, sampled)))

    def hear(self, by_client: dict[int, EngineCoreOutputs]) -> dict[str, EngineCoreOutput]:
        told = {output.request_id: output for outputs in by_client.values() for output in outputs.outputs}
        for name, output in told.items():
            assert name not in self.ends, "an output after the last"
            self.tokens[name] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[name] = output.finish_reason
        return told


def test_the_first_token_and_the_end_are_told_at_once_and_the_others_by_the_interval() -> None:
    side = Side()
    side.add("r", 10.0, max_tokens=7)
    told = []
    for side.now in (1.0, 4.0, 9.9, 10.0, 12.0, 19.9, 19.95):
        told.append([output.new_token_ids for output in side.step().values()])
    assert told == [[[1]], [], [], [[2, 3, 4]], [], [], [[5, 6, 7]]]
    assert side.ends == {"r": FinishReason.LENGTH}


def test_requests_of_one_interval_are_told_in_the_same_steps() -> None:
    side = Side()
    told = []
    for side.now in (1.0, 3.0, 6.0, 9.0, 11.0, 19.0, 20.0):
        if side.now in (1.0, 6.0):
            side.add(f"from {side.now:g}", 10.0)
        told.append({name: output.new_token_ids for name, output in side.step().items()})
    assert told == [
        {"from 1": [1]},
        {},
        {"from 6": [1]},
        {},
        {"from 1": [2, 3, 4, 5], "from 6": [2, 3]},
        {},
        {"from 1": [6, 7], "from 6": [4, 5]},
    ]


def test_what_is_held_of_a_request_that_is_preempted_is_told() -> None:
    side = Side(num_blocks=7)
    side.add("old", 1e9)
    side.add("new", 1e9)
    while side.scheduler.requests["new"].status is not RequestStatus.PREEMPTED:
        assert side.tokens["new"] in ([], [1])
        plan = side.scheduler.schedule()
        told = side.answer(plan)
    assert plan.preempted_req_ids == {"new"}
    assert list(told) == ["new"]
    assert side.tokens == {"old": [1], "new": list(range(1, 1 + side.numbers["new"]))}
    assert side.numbers["new"] > 1


def test_what_is_held_of_a_request_is_told_with_its_fault() -> None:
    side = Side()
    side.add("r", 1e9)
    for _ in range(3):
        side.step()
    answer = ModelRunnerOutput(["r"], [[]], faults={"r": Fault.NOT_FINITE})
    (told,) = side.hear(side.scheduler.update_from_output(side.scheduler.schedule(), answer)).values()
    assert told.new_token_ids == [2, 3]
    assert told.finish_reason is FinishReason.ERROR
    assert "NaN" in str(told.error)


def test_log_probabilities_are_held_with_their_tokens_and_the_runner_keeps_its_lists() -> None:
    side = Side()
    side.add("r", 1e9, max_tokens=3)
    given_lists = [LogprobsLists([[token]], [[-float(token)]], [1]) for token in (5, 6, 7)]
    sampled = [[5], [6], [7]]
    outputs = []
    for tokens, logprobs in zip(sampled, given_lists, strict=True):
        answer = ModelRunnerOutput(["r"], [tokens], logprobs={"r": logprobs})
        by_client = side.scheduler.update_from_output(side.scheduler.schedule(), answer)
        outputs += [output for each in by_client.values() for output in each.outputs]
    assert [output.new_token_ids for output in outputs] == [[5], [6, 7]]
    assert outputs[1].new_logprobs == LogprobsLists([[6], [7]], [[-6.0], [-7.0]], [1, 1])
    assert sampled == [[5], [6], [7]]
    assert given_lists[1] == LogprobsLists([[6]], [[-6.0]], [1])


def test_nothing_that_is_held_is_told_of_a_request_that_its_client_has_aborted() -> None:
    side = Side()
    side.add("r", 1e9)
    side.step()
    side.step()
    side.scheduler.finish_requests("r", ABORTED, tell_client=False)
    side.add("r", 0.0)
    side.numbers.clear()
    assert [output.new_token_ids for output in side.step().values()] == [[1]]
    assert side.scheduler.take_held() == {}


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(INTERVALS), st.integers(1, 12)),
        st.tuples(st.just("step"), st.sampled_from([0.0, 1.0, 5.0]), st.just(0)),
        st.tuples(st.just("abort"), st.just(0.0), st.integers(0, 5)),
        st.tuples(st.just("rest"), st.just(0.0), st.just(0)),
    ),
    min_size=8,
    max_size=40,
)


@settings(max_examples=300)
@given(events=EVENTS, num_blocks=st.integers(9, 20))
def test_the_same_is_told_in_the_end_whatever_is_held(
    events: list[tuple[str, float, int]], num_blocks: int
) -> None:
    held, oracle = Side(num_blocks), Side(num_blocks)
    for place, (kind, amount, number) in enumerate(events):
        for side in (held, oracle):
            if kind == "add":
                side.add(f"r{place}", amount if side is held else 0.0, max_tokens=number)
            elif kind == "abort":
                unfinished = sorted(side.scheduler.requests)
                side.scheduler.finish_requests(unfinished[number : number + 1], ABORTED, tell_client=False)
            elif kind == "step":
                side.now += amount
                side.step()
            else:
                side.hear(side.scheduler.take_held())
        unfinished = list(oracle.scheduler.requests)
        assert list(held.scheduler.requests) == unfinished
        assert held.ends == oracle.ends
        for name, tokens in oracle.tokens.items():
            told = held.tokens[name]
            assert told == tokens[: len(told)]
            assert told or not tokens
            if name in oracle.ends or (kind == "rest" and name in unfinished):
                assert told == tokens
    assert set(oracle.scheduler.take_held()) == set()


@pytest.mark.parametrize("interval", INTERVALS)
def test_each_token_is_told_once(interval: float) -> None:
    side = Side()
    side.add("r", interval, max_tokens=9)
    while side.scheduler.requests:
        side.now += 1
        side.step()
    assert side.tokens == {"r": list(range(1, 10))}
