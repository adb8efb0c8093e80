"""Reasoning with a budget, in an engine with several steps in flight."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from nbengine.config import CacheConfig, ParallelConfig, SchedulerConfig
from nbengine.engine.core.core import EngineCore
from nbengine.errors import RequestError
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.ipc.reasoning import ReasoningTokens
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.unit.engine import queued_executor
from tests.unit.engine.test_core import make_config

CLOSING = [700, 650, 800]


class ObeysMasks(queued_executor.QueuedExecutor):
    """The model that adds one until it comes to an allowed token."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.allowed: dict[str, set[int]] = {}

    def _sample(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        self.allowed = {}
        if grammar_output is not None:
            for name, row in zip(grammar_output.req_ids, grammar_output.bitmask, strict=True):
                bits = np.unpackbits(row.view(np.uint8), bitorder="little")
                self.allowed[name] = set(np.flatnonzero(bits).tolist())
        return super()._sample(grammar_output)

    def next_token(self, request_id: str) -> int:
        token = super().next_token(request_id)
        while token not in self.allowed.get(request_id, {token}):
            token = (token + 1) % self.vocab_size
        self.last_token[request_id] = token
        return token


class Eager(ObeysMasks):
    eager = True


class ThreeSteps(ObeysMasks):
    max_concurrent_batches = 3


class Stages(ObeysMasks):
    async_scheduling = False
    max_concurrent_batches = 3

    def sample_tokens(self, grammar_output: GrammarOutput | None = None, *, non_block: bool = False) -> Any:
        # The stages' masks are sent at once, and the buffer is filled again before they are used.
        return super().sample_tokens(deepcopy(grammar_output), non_block=non_block)


EXECUTORS = [ObeysMasks, Eager, ThreeSteps, Stages]


def make_core(executor: type[ObeysMasks] = ObeysMasks, **config: Any) -> EngineCore:
    if executor is Stages:
        config["parallel"] = ParallelConfig(pipeline_parallel_size=3)
    return EngineCore(make_config(**config), executor)


def add(
    core: EngineCore, name: str, last: int, *, marks: ReasoningTokens | None = None, **params: Any
) -> None:
    request = EngineCoreRequest(
        name,
        [last],
        SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params}),
        reasoning=marks or ReasoningTokens(endings=[[650]], closing=CLOSING),
    )
    core.add_request(*core.preprocess_add_request(request))


def run(core: EngineCore) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    while core.has_work():
        outputs, executed = core.step_fn()
        core.post_step(executed)
        for batch in outputs.values():
            for output in batch.outputs:
                assert output.error is None
                answers.setdefault(output.request_id, []).extend(output.new_token_ids)
    core.scheduler.check_integrity()
    assert core.stats().num_free_blocks == core.num_blocks
    return answers


def expected(last: int, ending: int, budget: int, max_tokens: int, *, opens: bool) -> list[int]:
    """Return what the model that adds one writes, after the token `last`."""
    output = [last + 1] if opens else []
    thought = [len(output) + last + place for place in range(1, budget + 1)]
    if ending in thought:
        thought = thought[: thought.index(ending) + 1]
        closing = []
    else:
        closing = [700, ending, 800]
    output += thought + closing
    following = (output[-1] if output else last) + 1
    return (output + list(range(following, following + max_tokens)))[:max_tokens]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_the_budget_is_kept_to_the_token_whatever_is_in_flight_or_preempted(
    executor: type[ObeysMasks], num_blocks: int
) -> None:
    rng = random.Random(3)
    core = make_core(
        executor,
        max_model_len=100,
        cache=CacheConfig(num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=20),
    )
    right: dict[str, list[int]] = {}
    for number in range(24):
        last, budget, max_tokens = 20 * number, rng.randrange(12), rng.randrange(1, 60)
        ending = last + rng.randrange(3, 30)
        opens = rng.random() < 0.4
        marks = ReasoningTokens(
            openings=[[last + 1]] if opens else [], endings=[[ending]], closing=[700, ending, 800]
        )
        add(core, f"r{number}", last, marks=marks, max_tokens=max_tokens, thinking_budget=budget)
        right[f"r{number}"] = expected(last, ending, budget, max_tokens, opens=opens)
    assert run(core) == right
    assert (core.scheduler.num_preemptions > 0) == (num_blocks == 8)


def test_only_the_steps_that_close_reasoning_wait_for_the_tokens_before_them() -> None:
    core = make_core()
    add(core, "r", 1, thinking_budget=5, max_tokens=14)
    assert run(core) == {"r": [2, 3, 4, 5, 6, *CLOSING, 801, 802, 803, 804, 805, 806]}
    executor = core.model_executor
    assert isinstance(executor, ObeysMasks)
    plans: list[SchedulerOutput] = executor.plans
    waits = [plan.step for plan in plans if plan.has_structured_output_requests]
    assert waits == [5, 6, 7]
    assert [step for step, mask in executor.masks.items() if mask is not None] == waits
    assert not core.scheduler._structured


def test_marks_alone_leave_a_request_as_it_is() -> None:
    core = make_core()
    add(core, "r", 1, max_tokens=3)
    assert core.scheduler.requests["r"].grammar is None
    assert run(core) == {"r": [2, 3, 4]}


@pytest.mark.parametrize("field", ["openings", "endings", "gaps", "closing"])
def test_marks_outside_the_vocabulary_are_refused(field: str) -> None:
    core = make_core()
    marks = {"endings": [[650]], "closing": [650]} | {field: [5000] if field == "closing" else [[5000]]}
    with pytest.raises(RequestError, match="reasoning has the token id 5000"):
        add(core, "r", 1, marks=ReasoningTokens(**marks), thinking_budget=1)
    assert not core.scheduler.requests


@pytest.mark.parametrize(
    ("written", "following"),
    [
        ([2, 3], [4, *CLOSING, 801]),
        ([2, 3, 4, 700], [650, 800, 801, 802]),
        ([2, 3, 4, *CLOSING], [801, 802, 803, 804]),
        ([2, 650], [651, 652, 653, 654]),
        # A branch has put another token into the closing: it is closed again.
        ([2, 3, 4, 700, 9], [*CLOSING, 801]),
    ],
)
def test_a_budget_counts_the_beginning_of_an_answer_that_goes_on_from_its_middle(
    written: list[int], following: list[int]
) -> None:
    core = make_core()
    marks = ReasoningTokens(endings=[[650]], closing=CLOSING, num_written=len(written))
    params = SamplingParams(temperature=0.0, max_tokens=len(following), thinking_budget=3)
    request = EngineCoreRequest("r", [1, *written], params, reasoning=marks)
    core.add_request(*core.preprocess_add_request(request))
    assert run(core) == {"r": following}
