"""EngineCore with several steps in flight: the order of things, and the same answers as with one."""

from __future__ import annotations

import random

import pytest

from nbengine.config import CacheConfig, ParallelConfig, SchedulerConfig
from nbengine.engine.core.core import EngineCore
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from nbengine.sampling_params import SamplingParams
from tests.process.process_support.fake_executor import FakeExecutor
from tests.unit.engine.queued_executor import (
    EagerExecutor,
    PipelineExecutor,
    QueuedExecutor,
    ThreeStepExecutor,
)
from tests.unit.engine.test_core import add, make_config
from tests.unit.scheduler.fake_grammar import FakeGrammar, FakeMasks

EXECUTORS = [QueuedExecutor, EagerExecutor, ThreeStepExecutor, PipelineExecutor]


def make_core(executor: type[FakeExecutor] = QueuedExecutor, **config) -> EngineCore:
    if executor is PipelineExecutor:
        config["parallel"] = ParallelConfig(pipeline_parallel_size=PipelineExecutor.max_concurrent_batches)
    return EngineCore(make_config(**config), executor)


def step(core: EngineCore) -> dict[int, EngineCoreOutputs]:
    outputs, executed = core.step_fn()
    core.post_step(executed)
    return outputs


def run(core: EngineCore) -> dict[str, tuple[list[int], FinishReason | None]]:
    """Step until nothing is left; what every request got, and how it ended."""
    answers: dict[str, tuple[list[int], FinishReason | None]] = {}
    while core.has_work():
        for batch in step(core).values():
            for output in batch.outputs:
                tokens, reason = answers.get(output.request_id, ([], None))
                assert reason is None, "an output after the last one"
                answers[output.request_id] = (tokens + output.new_token_ids, output.finish_reason)
    core.scheduler.check_integrity()
    assert core.stats().num_free_blocks == core.num_blocks
    return answers


def test_the_next_step_is_planned_and_handed_over_before_one_is_waited_for() -> None:
    core = make_core()
    executor: QueuedExecutor = core.model_executor
    add(core, "r", [1])
    assert step(core) == {}
    assert (core.num_steps_in_flight, executor.log) == (1, [])
    (batch,) = step(core).values()
    assert batch.outputs[0].new_token_ids == [2]
    assert [plan.step for plan in executor.plans] == [0, 1]
    assert executor.log == [("execute", 0), ("sample", 0)]
    assert core.num_steps_in_flight == 1


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_answers_are_those_of_one_step_at_a_time(executor: type[FakeExecutor], num_blocks: int) -> None:
    def answers(kind: type[FakeExecutor]) -> dict[str, tuple[list[int], FinishReason | None]]:
        rng = random.Random(5)
        core = make_core(
            kind,
            max_model_len=100,
            cache=CacheConfig(num_gpu_blocks_override=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=20),
        )
        for number in range(16):
            prompt = [rng.randrange(500) for _ in range(rng.randrange(1, 60))]
            stop = [prompt[-1] + rng.randrange(1, 60)]
            add(core, f"r{number}", prompt, stop_token_ids=stop, max_tokens=rng.randrange(1, 40))
        found = run(core)
        assert (core.scheduler.num_preemptions > 0) == (num_blocks == 8)
        return found

    assert answers(executor) == answers(FakeExecutor)


def test_max_tokens_is_never_computed_beyond_and_a_stop_by_one_token_a_step_in_flight() -> None:
    core = make_core()
    add(core, "length", [1], max_tokens=5)
    assert run(core) == {"length": ([2, 3, 4, 5, 6], FinishReason.LENGTH)}
    assert core.model_executor.num_computed == 5
    core = make_core()
    add(core, "stop", [1], max_tokens=50, stop_token_ids=[4])
    assert run(core) == {"stop": ([2, 3, 4], FinishReason.STOP)}
    assert core.model_executor.num_computed == 3 + 1


@pytest.mark.parametrize("late", [True, False], ids=["while-waiting", "between-steps"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_request_aborted_with_steps_in_flight_gets_nothing_more(
    executor: type[FakeExecutor], late: bool
) -> None:
    core = make_core(executor)
    for name in ("gone", "kept"):
        add(core, name, [1], max_tokens=8)
    step(core)
    step(core)
    if late:
        core.aborts_queue.put((0, ["gone"]))
    else:
        core.abort_for_client(0, ["gone"])
    add(core, "gone" if not late else "other", [100], max_tokens=3)
    answers = run(core)
    assert answers["gone" if not late else "other"] == ([101, 102, 103], FinishReason.LENGTH)
    tokens, reason = answers["kept"]
    assert reason is FinishReason.LENGTH
    assert tokens == list(range(10 - len(tokens), 10))
    assert not late or "gone" not in answers


def test_a_failure_is_that_of_the_step_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(knobs={"fail_at_token": 3})
    add(core, "r", [1])
    step(core)
    step(core)
    with pytest.raises(RuntimeError, match="broke at token 3"):
        step(core)
    assert "step 1 (1 tokens of 1 requests: r: 1) failed" in caplog.text


def test_ends_that_a_client_did_not_ask_for_are_told_to_it_alone() -> None:
    core = make_core()
    for client in (1, 2):
        for number in range(2):
            add(core, f"{client}.{number}", [1], client_index=client, max_tokens=50)
    step(core)
    core.abort_requests(["1.0"])
    core.scheduler.finish_requests("2.0", core.scheduler.requests["2.1"].status.FINISHED_ABORTED)
    outputs = step(core)
    assert outputs[1].finished_requests is None
    assert outputs[2].finished_requests == ["2.0"]
    assert [o.request_id for batch in outputs.values() for o in batch.outputs] == ["1.1", "2.1"]
    assert step(core)[2].finished_requests is None


def constrained(core: EngineCore, request_id: str, length: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    prepared, wave = core.preprocess_add_request(EngineCoreRequest(request_id, [1], params))
    prepared.grammar = AnyTokens(length)
    core.add_request(prepared, wave)


class AnyTokens(FakeGrammar):
    """Allows everything, and counts."""

    def accept_tokens(self, token_ids: list[int]) -> bool:
        self.accepted += token_ids
        return True


@pytest.mark.parametrize("executor", [QueuedExecutor, ThreeStepExecutor])
def test_a_step_with_masks_is_executed_ahead_but_sampled_after_the_tokens_before_it_were_accepted(
    executor: type[QueuedExecutor],
) -> None:
    core = make_core(executor)
    core.scheduler._grammar_masks = FakeMasks()
    constrained(core, "structured", 3)
    accepted_at_mask: dict[int, int] = {}
    build = core.scheduler.get_grammar_bitmask

    def watch(plan):
        if "structured" in core.scheduler.requests:
            accepted_at_mask[plan.step] = len(core.scheduler.requests["structured"].grammar.accepted)
        return build(plan)

    core.scheduler.get_grammar_bitmask = watch
    add(core, "plain", [100], max_tokens=6)
    answers = run(core)
    assert answers["structured"] == ([2, 3, 4], FinishReason.STOP)
    assert answers["plain"] == ([101, 102, 103, 104, 105, 106], FinishReason.LENGTH)
    assert accepted_at_mask == {0: 0, 1: 1, 2: 2}
    assert [mask is not None for mask in core.model_executor.masks.values()] == [True] * 3 + [False] * 3


def test_an_idle_engine_has_no_step_in_flight_that_anyone_waits_for() -> None:
    core = make_core()
    assert not core.has_work()
    assert core.step_fn() == ({}, False)
    add(core, "r", [1], max_tokens=2)
    run(core)
    assert core.num_steps_in_flight == 0
    assert core.step_fn() == ({}, False)


def test_nothing_is_planned_while_a_step_with_masks_waits_for_several_before_it() -> None:
    core = make_core(ThreeStepExecutor)
    core.scheduler._grammar_masks = FakeMasks()
    add(core, "plain", [100], max_tokens=6)
    step(core)
    step(core)
    constrained(core, "structured", 3)
    step(core)
    assert core.num_steps_in_flight == 2
    assert core.batch_queue[-1].awaits_sampling
    step(core)
    assert core.num_steps_in_flight == 1
    assert not core.batch_queue[-1].awaits_sampling
    answers = run(core)
    assert answers["structured"] == ([2, 3, 4], FinishReason.STOP)


def test_steps_with_masks_wait_for_no_others_where_no_request_is_scheduled_ahead_of_its_tokens() -> None:
    core = make_core(PipelineExecutor)
    core.scheduler._grammar_masks = FakeMasks()
    for name in ("a", "b", "c"):
        constrained(core, name, 4)
    step(core)
    step(core)
    assert [list(s.plan.num_scheduled_tokens) for s in core.batch_queue] == [["a"], ["b"]]
    assert not any(s.awaits_sampling for s in core.batch_queue)
    answers = run(core)
    assert answers == dict.fromkeys(("a", "b", "c"), ([2, 3, 4, 5], FinishReason.STOP))
    first, second, *_ = core.model_executor.masks.values()
    assert (first.req_ids, second.req_ids) == (["a"], ["b"])


def test_a_plan_that_says_nothing_is_not_sent_to_the_workers() -> None:
    core = make_core(PipelineExecutor)
    add(core, "alone", [1], max_tokens=6)
    assert run(core) == {"alone": ([2, 3, 4, 5, 6, 7], FinishReason.LENGTH)}
    plans = core.model_executor.plans
    assert [plan.total_num_scheduled_tokens for plan in plans] == [1] * 6 + [0]
    assert plans[-1].finished_req_ids == {"alone"}
    assert core.scheduler.step_counter > len(plans)


@pytest.mark.parametrize("call", [("pause_generation", ["keep"]), ("sleep", [1, "keep"])])
def test_what_needs_the_model_to_stand_still_waits_for_the_steps_in_flight(call: tuple[str, list]) -> None:
    core = make_core()
    add(core, "r", [1], max_tokens=6)
    step(core)
    step(core)
    assert core.num_steps_in_flight == 1
    done = core.call_utility(*call)
    assert not done.done()
    (batch,) = step(core).values()
    assert batch.outputs[0].new_token_ids == [3]
    assert done.done()
    assert done.exception() is None
    assert (core.num_steps_in_flight, core.scheduler.has_unfinished_requests()) == (0, True)
    while core.has_work():
        assert step(core) == {}, "workers are told, and nothing is computed"
    core.call_utility("resume_generation" if call[0] == "pause_generation" else "wake_up", [])
    assert run(core) == {"r": ([4, 5, 6, 7], FinishReason.LENGTH)}


@pytest.mark.parametrize("call", [("pause_generation", ["keep"]), ("sleep", [1, "keep"])])
def test_the_stages_stand_still_when_all_their_steps_have_ended(call: tuple[str, list]) -> None:
    core = make_core(PipelineExecutor)
    for number in range(5):
        add(core, f"r{number}", [100 * number], max_tokens=6)
    while core.num_steps_in_flight < 2:
        step(core)
    done = core.call_utility(*call)
    computed = core.model_executor.num_computed
    answers: dict[str, list[int]] = {f"r{number}": [] for number in range(5)}
    while not done.done():
        assert core.num_steps_in_flight
        for output in (output for batch in step(core).values() for output in batch.outputs):
            answers[output.request_id] += output.new_token_ids
    assert core.num_steps_in_flight == 0
    assert core.model_executor.num_computed - computed <= 5, "what was planned is computed, and nothing else"
    core.call_utility("resume_generation" if call[0] == "pause_generation" else "wake_up", [])
    for name, (tokens, _) in run(core).items():
        answers[name] += tokens
    assert answers == {f"r{n}": [100 * n + place for place in range(1, 7)] for n in range(5)}
