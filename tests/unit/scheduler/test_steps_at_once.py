"""Several steps at once end as steps one by one do; a scheduler that plans one at a time is the oracle."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.ipc.messages import EngineCoreOutputs, FinishReason
from nbengine.kv_cache.specs import FULL, make_groups
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.output import CachedRequestData, Fault, ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.request import Request
from nbengine.scheduler.scheduler import Scheduler
from nbengine.scheduler.steps_at_once import StepsAllowed
from nbengine.scheduler.trace_stream import TraceStream
from tests.support.thorough import amount
from tests.unit.scheduler.layered_model import Rules, tables_of
from tests.unit.scheduler.mixtures import MIXTURES, STATE
from tests.unit.scheduler.paged_model import EOS, VOCAB_SIZE, FakeWorker, sequential_tokens
from tests.unit.scheduler.short_histories import ABORTED, add
from tests.unit.scheduler.traced import compare_blocks, compare_request, over_the_wire

BLOCK_SIZE = 4
MANY = StepsAllowed(8, 1.0)


class Clock:
    """A clock on which each look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Side:
    """A scheduler, and a runner that gives each request the numbers of its tokens, for up to as many steps as a plan
    asks for: fewer if a request's token is one of its ends."""

    def __init__(
        self, allowed: StepsAllowed | None, num_blocks: int = 64, seed: int = 0, limit: int = 64
    ) -> None:
        self.allowed = allowed
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
            CacheConfig(block_size=BLOCK_SIZE),
            num_blocks,
            limit,
            clock=lambda: 0.0,
        )
        self.random = Random(seed)
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, FinishReason] = {}
        self.sizes: list[int] = []
        """The steps that the plans asked for."""
        self.num_steps = 0
        self.clock = Clock()
        self.trace = TraceStream(self.scheduler, self.clock)
        self.mirror: TraceMirror | None = None

    def follow(self) -> None:
        """Have everything told from now on, and compared."""
        self.trace.record(True)
        self.mirror = TraceMirror(0)
        for message in self.trace.snapshot(self.clock(), self.scheduler.make_stats()):
            assert self.mirror.apply(over_the_wire(message))

    def add(self, name: str, interval: float = 100.0, num_prompt: int = 4, **params: Any) -> Request:
        request = add(self.scheduler, name, num_prompt, **{"temperature": 0.0, **params})
        request.output_interval = interval
        return request

    def plan(self) -> SchedulerOutput:
        plan = self.scheduler.schedule() if self.allowed is None else self.scheduler.schedule(self.allowed)
        self.sizes.append(plan.num_steps)
        return plan

    def step(self) -> int:
        """Plan and compute; return the number of steps that were computed."""
        plan = self.plan()
        names, requests = list(plan.num_scheduled_tokens), self.scheduler.requests
        known = {name: requests[name].num_output_tokens for name in names}
        due = [name for name in names if name not in plan.incomplete_req_ids]
        count = self.random.randint(1, plan.num_steps)
        for further in range(1, count):
            if any(known[name] + further in requests[name].stop_token_ids for name in due):
                count = further
                break
        for name in names if count > 1 else ():
            self._check_room(requests[name], count)
        sampled = [
            list(range(known[name] + 1, known[name] + 1 + count)) if name in due else [] for name in names
        ]
        before = self.scheduler.step_counter
        ends = [self.clock() for _ in range(count - 1)]
        self.hear(self.scheduler.update_from_output(plan, ModelRunnerOutput(names, sampled, step_ends=ends)))
        assert self.scheduler.step_counter == before + count - 1
        self.num_steps += count
        if self.mirror is not None:
            self.compare(self.mirror, plan, count)
        return count

    def compare(self, mirror: TraceMirror, plan: SchedulerOutput, count: int) -> None:
        """Take in what has been told of the latest steps: it is the truth, and each step has its own times."""
        is_told = bool(plan.num_scheduled_tokens or plan.preempted_req_ids)
        batch = self.trace.take_batch(self.clock(), self.scheduler.make_stats())
        if batch is None:
            assert not is_told
            return
        assert mirror.apply(over_the_wire(batch))
        compare_blocks(mirror, self.scheduler)
        assert {view.added.request_id for view in mirror.requests.values()} == set(self.scheduler.requests)
        for request in self.scheduler.requests.values():
            compare_request(mirror.requests[request.number], request)
        if not is_told:
            return
        steps = list(mirror.steps)[-count:]
        assert [step.step for step in steps] == list(range(plan.step, plan.step + count))
        first = list(plan.num_scheduled_tokens.values())
        assert [list(step.num_tokens) for step in steps] == [first] + [[1] * len(first)] * (count - 1)
        due = len(first) - len(plan.incomplete_req_ids)
        assert [step.num_sampled for step in steps] == [due] * count
        times = [(step.time, step.time + (step.seconds or 0.0)) for step in steps]
        assert all(began < ended for began, ended in times)
        assert all(one[1] == other[0] for one, other in pairwise(times))

    def _check_room(self, request: Request, count: int) -> None:
        """There is a block for each token that the steps compute, and the last of them may be had."""
        computed = request.num_computed_tokens + count - 1
        assert computed <= len(request.block_ids) * BLOCK_SIZE
        assert request.num_tokens + count <= request.max_total_tokens

    def hear(self, by_client: dict[int, EngineCoreOutputs]) -> None:
        for output in (output for outputs in by_client.values() for output in outputs.outputs):
            assert output.request_id not in self.ends
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason

    def run(self) -> None:
        while self.scheduler.requests:
            self.step()
        self.scheduler.check_integrity()


REQUESTS = st.tuples(
    st.integers(1, 14),
    st.integers(1, 30),
    st.lists(st.integers(1, 30), max_size=2),
    st.sampled_from([0.0, 1.0, 3.0, 100.0, 100.0, 100.0]),
    st.sampled_from([0.0, 0.0, 0.0, 0.7]),
)
EVENTS = st.lists(st.one_of(REQUESTS, st.integers(1, 6), st.just("abort"), st.just("reset")), max_size=25)


@settings(max_examples=amount(400, thorough=10_000))
@given(events=EVENTS, num_blocks=st.integers(12, 30), seed=st.integers(0, 10**6), follow=st.booleans())
def test_the_same_comes_out_in_the_end_and_is_told(
    events: list[Any], num_blocks: int, seed: int, follow: bool
) -> None:
    several, oracle = Side(MANY, num_blocks, seed, limit=44), Side(None, num_blocks, limit=44)
    if follow:
        several.follow()
    for side in (several, oracle):
        for place, event in enumerate(events):
            if isinstance(event, tuple):
                num_prompt, most, ends, interval, temperature = event
                side.add(
                    f"r{place}",
                    interval,
                    num_prompt,
                    max_tokens=most,
                    stop_token_ids=ends,
                    temperature=temperature,
                )
            elif event == "reset":
                side.scheduler.reset_prefix_cache(reset_running_requests=True)
            elif event == "abort":
                names = [name for name in side.scheduler.requests if name not in side.tokens]
                side.scheduler.finish_requests(names[:1], ABORTED, tell_client=False)
            else:
                for _ in range(event):
                    side.step()
        side.run()
    # Which requests had begun when others were aborted depends on how fast they are.
    for name in several.ends.keys() & oracle.ends.keys():
        assert several.tokens[name] == oracle.tokens[name]
        assert several.ends[name] is oracle.ends[name]
    if "abort" not in events:
        assert several.ends == oracle.ends
    assert set(oracle.sizes) <= {1}


def test_the_histories_have_plans_of_many_sizes() -> None:
    side = Side(MANY, seed=3)
    for name in "abc":
        side.add(name, max_tokens=40)
    side.run()
    assert {1, 8} < set(side.sizes)
    assert side.num_steps == 40


@pytest.mark.parametrize("count", [2, 5, 6, 7, 8])
def test_what_is_found_of_an_answer_does_not_depend_on_how_it_was_computed(count: int) -> None:
    found = []
    for allowed in (None, StepsAllowed(count, 1.0)):
        side = Side(allowed)
        side.random.randint = lambda _, most: most  # type: ignore[method-assign]
        side.add("first", max_tokens=17)
        side.run()
        found.append(side.scheduler.kv_cache_manager.block_pool.num_cached_blocks)
    # Of 21 tokens the last one is not computed.
    assert found == [5, 5]


class PagedRun:
    """A scheduler, and a worker whose memory shows what was shared, reused or left out by mistake."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.random, self.rules = Random(seed), rules
        num_slots = 7 if STATE in rules else 0
        num_blocks = 12 * len(tables_of(rules)) + 1 if tables_of(rules) else 0
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=20),
            CacheConfig(block_size=BLOCK_SIZE),
            num_blocks,
            48,
            options=SchedulerOptions(groups=make_groups(rules), num_state_slots=num_slots),
            clock=lambda: 0.0,
        )
        states = self.scheduler.kv_cache_manager.states
        if states is not None:
            assert states._rule is not None
            # The product's spacing would be longer than the requests.
            states._rule = replace(states._rule, finest=BLOCK_SIZE)
        self.worker = FakeWorker(num_blocks, BLOCK_SIZE, None, rules, num_slots)
        self.prompts: dict[str, list[int]] = {}
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.sizes: list[int] = []

    def add(self) -> None:
        """Add a request, half of them with a prompt that goes on where another was."""
        name, chance = f"r{len(self.prompts)}", self.random
        prompt = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 17))]
        if self.prompts and chance.random() < 0.5:
            before = chance.choice(list(self.prompts))
            prompt = [*self.prompts[before], *self.tokens[before]][:20] + prompt[:3]
        self.prompts[name] = prompt
        params = SamplingParams(max_tokens=chance.randint(1, 24), stop_token_ids=[EOS], temperature=0)
        request = Request(name, prompt, params, block_hasher=self.scheduler.kv_cache_manager.block_hasher)
        request.output_interval = chance.choice([100.0, 100.0, 100.0, 0.0])
        self.scheduler.add_request(request)

    def step(self) -> None:
        plan = self.scheduler.schedule(MANY)
        answer = self.worker.execute(plan)
        self.sizes.append(1)
        for _ in range(self.random.randint(1, plan.num_steps) - 1):
            if any(tokens[-1] == EOS for tokens in answer.sampled_token_ids):
                break
            cached = plan.scheduled_cached_reqs
            following = CachedRequestData(
                cached.req_ids,
                new_block_ids=[None for _ in cached.req_ids],
                num_computed_tokens=[number + self.sizes[-1] for number in cached.num_computed_tokens],
            )
            further = SchedulerOutput(
                [], following, plan.num_scheduled_tokens, plan.total_num_scheduled_tokens, set()
            )
            for tokens, more in zip(
                answer.sampled_token_ids, self.worker.execute(further).sampled_token_ids, strict=True
            ):
                tokens += more
            self.sizes[-1] += 1
        answer.step_ends = [0.0] * (self.sizes[-1] - 1)
        for outputs in self.scheduler.update_from_output(plan, answer).values():
            for output in outputs.outputs:
                self.tokens[output.request_id] += output.new_token_ids

    def check(self) -> None:
        for name, prompt in self.prompts.items():
            tokens = self.tokens[name]
            expected = sequential_tokens(prompt, len(tokens), rules=self.rules)
            assert tokens == expected
            assert EOS not in tokens[:-1]
        self.scheduler.check_integrity()


@pytest.mark.parametrize("mixture", ["full", *MIXTURES])
def test_every_slot_and_state_is_where_its_tokens_need_it(mixture: str) -> None:
    sizes: set[int] = set()
    preemptions = hits = 0
    for seed in range(amount(25, thorough=1000)):
        run = PagedRun(MIXTURES.get(mixture, (FULL,)), seed)
        for _ in range(8):
            run.add()
            for _ in range(run.random.choice([0, 1, 4, 9])):
                run.step()
        while run.scheduler.requests:
            run.step()
        run.check()
        sizes.update(run.sizes)
        preemptions += run.scheduler.num_preemptions
        hits += run.scheduler.make_stats().prefix_cache_hits
    assert max(sizes) == (4 if STATE in MIXTURES.get(mixture, ()) else 8)
    assert hits
    assert preemptions or mixture in ("window", "chunk", "recurrent", "window and recurrent")


def refuses(side: Side) -> bool:
    """Tell whether the next plan asks for one step."""
    return side.plan().num_steps == 1


OTHERS: dict[str, dict[str, Any]] = {
    "each token told": {"interval": 0.0},
    "log probabilities": {"logprobs": 0},
    "penalties": {"presence_penalty": 0.5},
    "bias": {"logit_bias": {3: 1.0}},
    "few tokens": {"allowed_token_ids": [1, 2]},
    "not an end yet": {"min_tokens": 9},
    "one token left": {"max_tokens": 2},
}


@pytest.mark.parametrize("other", OTHERS)
def test_one_request_that_wants_each_step_for_itself_keeps_all_to_one(other: str) -> None:
    side = Side(MANY)
    side.add("plain", max_tokens=40)
    side.step()
    assert side.plan().num_steps == 8
    side = Side(MANY)
    side.add("plain", max_tokens=40)
    side.add("other", **{"max_tokens": 40, **OTHERS[other]})
    side.step()
    assert refuses(side)


def test_a_request_with_a_grammar_keeps_all_to_one_step() -> None:
    side = Side(MANY)
    request = side.add("r", max_tokens=40, structured_outputs=StructuredOutputsParams(json_object=True))
    side.step()
    request.grammar = object()  # type: ignore[assignment]
    assert refuses(side)


def test_while_a_request_waits_there_is_one_step_at_a_time() -> None:
    side = Side(MANY)
    for name in "abcde":
        side.add(name, max_tokens=20)
    side.step()
    assert refuses(side)


def test_those_who_follow_hear_of_each_step() -> None:
    side = Side(MANY)
    side.random.randint = lambda _, most: most  # type: ignore[method-assign]
    for name in "ab":
        side.add(name, max_tokens=20)
    side.follow()
    side.run()
    assert max(side.sizes) == 8
    assert side.mirror is not None
    steps = list(side.mirror.steps)
    assert [step.step for step in steps] == list(range(20))
    assert [step.num_sampled for step in steps] == [2] * 20
    # Both end with the last step, which is the one that is told last.
    assert [len(step.finished) for step in steps] == [0] * 19 + [2]


def test_prompts_are_computed_in_steps_of_their_own() -> None:
    side = Side(MANY)
    side.add("a", max_tokens=20)
    assert refuses(side)
    side = Side(MANY)
    side.add("a", max_tokens=20)
    side.step()
    side.add("b", max_tokens=20)
    assert refuses(side)


def test_tokens_are_held_no_longer_than_their_request_allows() -> None:
    side = Side(StepsAllowed(8, 0.01))
    side.add("a", 0.25, max_tokens=20)
    side.add("b", 0.035, max_tokens=20)
    side.step()
    assert side.plan().num_steps == 3


def test_nobody_loses_blocks_for_steps_at_once() -> None:
    # Each has two of the four blocks when its second one is full.
    side = Side(MANY, num_blocks=5)
    side.random.randint = lambda _, most: most  # type: ignore[method-assign]
    for name in "ab":
        side.add(name, max_tokens=9)
    side.step()
    assert side.step() == 4
    assert side.scheduler.num_preemptions == 0


def test_steps_are_counted_by_their_ends_where_the_last_one_has_brought_no_token() -> None:
    side = Side(MANY)
    side.add("a", max_tokens=20)
    side.step()
    side.follow()
    plan = side.plan()
    ends = [side.clock(), side.clock()]
    answer = ModelRunnerOutput(["a"], [[2, 3]], faults={"a": Fault.NOT_FINITE}, step_ends=ends)
    side.hear(side.scheduler.update_from_output(plan, answer))
    side.add("b", max_tokens=3)
    following = side.plan()
    assert following.step == plan.step + 3
    side.hear(side.scheduler.update_from_output(following, ModelRunnerOutput(["b"], [[1]])))
    batch = side.trace.take_batch(0.0, side.scheduler.make_stats())
    assert side.mirror is not None
    assert batch is not None
    assert side.mirror.apply(over_the_wire(batch))
    assert [step.step for step in side.mirror.steps] == list(range(plan.step, plan.step + 4))


def test_a_fault_in_a_later_step_keeps_the_tokens_before_it() -> None:
    side = Side(MANY)
    for name in "ab":
        side.add(name, max_tokens=20)
    side.step()
    side.follow()
    plan = side.plan()
    assert plan.num_steps == 8
    ends = [side.clock(), side.clock()]
    answer = ModelRunnerOutput(
        ["a", "b"], [[2, 3], [2, 3, 4]], faults={"a": Fault.NOT_FINITE}, step_ends=ends
    )
    side.hear(side.scheduler.update_from_output(plan, answer))
    batch = side.trace.take_batch(0.0, side.scheduler.make_stats())
    assert side.mirror is not None
    assert batch is not None
    assert side.mirror.apply(over_the_wire(batch))
    assert [step.num_sampled for step in side.mirror.steps] == [2, 2, 1]
    side.mirror = None
    assert side.tokens["a"] == [1, 2, 3]
    assert side.ends == {"a": FinishReason.ERROR}
    side.run()
    assert side.tokens["b"] == list(range(1, 21))
    assert side.scheduler.meter.num_generation_tokens == 3 + 20
