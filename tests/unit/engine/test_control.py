"""Pausing and sleeping: what waits, what goes on, and that nothing is computed that must not be."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from nbengine.engine.core.core import EngineCore
from nbengine.errors import EngineStartError, InvalidArgumentError, RequestError, UtilityError
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.outputs.pooling_state import PoolingFuture
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from nbengine.ipc.utilities import PAUSE_MODES
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.pause import PauseState
from nbengine.scheduler.request import Request
from tests.process.process_support.fake_executor import FakeExecutor
from tests.support.thorough import amount
from tests.unit.engine.queued_executor import (
    EagerExecutor,
    PipelineExecutor,
    QueuedExecutor,
    ThreeStepExecutor,
)

EXECUTORS = [FakeExecutor, EagerExecutor, QueuedExecutor, ThreeStepExecutor, PipelineExecutor]


def make_config(knobs: dict[str, Any] | None = None, num_blocks: int = 32, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="fake", hf_overrides=knobs or {}),
        cache=CacheConfig(num_gpu_blocks_override=num_blocks, block_size=4),
        scheduler=SchedulerConfig(**scheduler),
    )


class Rig:
    """An engine core, what its clients have been told, and futures that are still open."""

    def __init__(
        self, config: EngineConfig | None = None, executor_class: type[FakeExecutor] = FakeExecutor
    ) -> None:
        self.core = EngineCore(config or make_config(), executor_class)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def add(self, request_id: str, first: int, max_tokens: int = 4) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = EngineCoreRequest(request_id, [first], params)
        self.core.add_request(*self.core.preprocess_add_request(request))
        self.tokens[request_id] = []

    def call(self, method: str, *args: Any) -> Any:
        result = self.core.call_utility(method, list(args))
        for _, outputs in self.core.take_unsent_outputs():
            self.hear(outputs)
        return result

    def step(self) -> None:
        outputs, executed = self.core.step_fn()
        for batch in outputs.values():
            self.hear(batch)
        self.core.post_step(executed)

    def hear(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            assert output.request_id not in self.reasons, "an output after the last"
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def run(self) -> None:
        """Step as long as the busy loop would."""
        while self.core.has_work():
            self.step()


def counting(first: int, count: int) -> list[int]:
    return list(range(first + 1, first + count + 1))


@pytest.fixture(params=EXECUTORS)
def rig(request: pytest.FixtureRequest) -> Rig:
    rig = Rig(executor_class=request.param)
    rig.add("a", 10)
    rig.add("b", 50)
    rig.step()
    return rig


def test_abort_ends_everything_and_the_rest_waits_for_the_resumption(rig: Rig) -> None:
    done = rig.call("pause_generation", "abort", True)
    assert rig.reasons == {"a": FinishReason.ABORT, "b": FinishReason.ABORT}
    rig.run()
    assert isinstance(done, Future)
    assert done.result(0) is None
    assert rig.call("is_paused")
    rig.add("late", 100)
    rig.run()
    assert rig.tokens["late"] == []
    assert rig.core.stats().is_paused
    rig.call("resume_generation")
    rig.run()
    assert rig.tokens["late"] == counting(100, 4)
    assert not rig.core.stats().is_paused


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (("pause_generation",), "the engine was paused with mode='abort'"),
        (("sleep", 1, "abort"), "the engine was put to sleep with mode='abort'"),
    ],
)
def test_who_waits_for_a_vector_is_told_who_ended_the_request(call: tuple[Any, ...], reason: str) -> None:
    core = EngineCore(make_config(), FakeExecutor)
    frontend = OutputProcessor(None)
    future: PoolingFuture = Future()
    for name, waiting in (("stepped", None), ("awaited", future)):
        wire = EngineCoreRequest(name, [1, 2], None, PoolingParams(task="embed", pooling="mean"))
        frontend.pooling.add(wire, None, waiting)
        core.add_request(Request.from_engine_core_request(wire, None))
    core.call_utility(call[0], list(call[1:]))
    ((_, outputs),) = core.take_unsent_outputs()
    (error,) = frontend.process_outputs(outputs.outputs).errors
    assert str(error).startswith(f"request stepped: it was aborted: {reason}")
    with pytest.raises(RequestError, match=f"request awaited: it was aborted: {reason}"):
        future.result(0)


def test_wait_lets_what_has_begun_finish_and_admits_nothing(rig: Rig) -> None:
    done = rig.call("pause_generation", "wait", True)
    rig.add("late", 100)
    assert not done.done()
    rig.run()
    assert done.result(0) is None
    assert (rig.tokens["a"], rig.tokens["b"], rig.tokens["late"]) == (counting(10, 4), counting(50, 4), [])
    assert rig.core.stats().num_cached_blocks == 0


@pytest.mark.parametrize("clear_cache", [True, False])
def test_keep_stops_requests_where_they_are(rig: Rig, clear_cache: bool) -> None:
    rig.call("pause_generation", "keep", clear_cache)
    rig.run()
    before = dict(rig.tokens)
    rig.step()
    assert rig.tokens == before
    held = rig.core.num_blocks - rig.core.stats().num_free_blocks
    assert held == (0 if clear_cache else 2)
    rig.call("resume_generation")
    rig.run()
    assert rig.tokens == {"a": counting(10, 4), "b": counting(50, 4)}


def test_a_resumption_calls_off_a_pause_that_still_waits(rig: Rig) -> None:
    done = rig.call("pause_generation", "wait", True)
    rig.call("resume_generation")
    with pytest.raises(UtilityError, match="resumed before"):
        done.result(0)
    rig.add("late", 100)
    rig.run()
    assert rig.tokens["late"] == counting(100, 4)


def test_what_waits_behind_a_pause_that_is_called_off_happens_then() -> None:
    rig = Rig()
    rig.add("a", 10)
    rig.step()
    rig.call("pause_generation", "wait", True)
    asleep = rig.call("sleep", 1, "keep")
    assert not asleep.done()
    rig.call("resume_generation")
    assert asleep.done()
    assert rig.call("is_sleeping")


def test_it_does_not_fall_asleep_over_unfinished_requests_unless_told_how(rig: Rig) -> None:
    with pytest.raises(UtilityError, match="2 unfinished requests are not paused"):
        rig.call("sleep")
    rig.run()
    assert rig.tokens == {"a": counting(10, 4), "b": counting(50, 4)}


@pytest.mark.parametrize("mode", PAUSE_MODES)
@pytest.mark.parametrize("level", [1, 2])
def test_asleep_nothing_is_held_or_computed_and_requests_go_on_afterwards(
    rig: Rig, level: int, mode: str
) -> None:
    rig.call("sleep", level, mode)
    rig.add("late", 100)
    rig.run()
    stats = rig.core.stats()
    assert (stats.sleep_level, stats.is_sleeping) == (level, True)
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (stats.num_blocks, 0)
    assert ("sleep", level) in rig.core.model_executor.rpc_calls
    assert rig.tokens["late"] == []
    rig.call("wake_up")
    rig.run()
    assert not rig.call("is_sleeping")
    assert rig.tokens["late"] == counting(100, 4)
    if mode == "abort":
        assert rig.reasons["a"] is rig.reasons["b"] is FinishReason.ABORT
    else:
        assert (rig.tokens["a"], rig.tokens["b"]) == (counting(10, 4), counting(50, 4))


def test_requests_that_a_pause_holds_back_do_not_keep_it_awake(rig: Rig) -> None:
    rig.call("pause_generation", "keep", False)
    rig.call("sleep")
    rig.run()
    assert rig.call("is_sleeping")
    rig.call("wake_up")
    rig.run()
    assert rig.tokens["a"] != counting(10, 4), "the pause is over with the sleep"
    rig.call("resume_generation")
    rig.run()
    assert rig.tokens == {"a": counting(10, 4), "b": counting(50, 4)}


def test_memory_can_come_back_in_parts() -> None:
    rig = Rig()
    rig.call("sleep", 1)
    rig.add("a", 10)
    rig.call("wake_up", ["weights"])
    assert rig.call("is_sleeping")
    rig.run()
    assert rig.tokens["a"] == []
    rig.call("wake_up", ["kv_cache"])
    rig.run()
    assert rig.tokens["a"] == counting(10, 4)
    calls = [call for call in rig.core.model_executor.rpc_calls if call[0].endswith("wake_up")]
    tags = ("weights", "kv_cache")
    assert calls == [(method, tag) for tag in tags for method in ("check_wake_up", "wake_up")]


def test_only_a_deeper_sleep_adds_to_one() -> None:
    rig = Rig()
    for level in (1, 1, 2, 1):
        rig.call("sleep", level)
    assert [call for call in rig.core.model_executor.rpc_calls if call[0] == "sleep"] == [
        ("sleep", 1),
        ("sleep", 2),
    ]
    assert rig.core.stats().sleep_level == 2


def test_an_engine_that_is_kept_asleep_refuses_requests_until_it_is_woken_up() -> None:
    rig = Rig()
    rig.add("early", 10)
    rig.call("sleep", 1, "keep", True)
    assert rig.core.stats().is_kept_asleep
    for _ in range(2):
        with pytest.raises(RequestError, match="request late: the engine is kept asleep"):
            rig.add("late", 50)
        rig.call("wake_up", ["weights"])
    rig.call("wake_up")
    assert not rig.core.stats().is_kept_asleep
    rig.add("late", 50)
    rig.run()
    assert (rig.tokens["early"], rig.tokens["late"]) == (counting(10, 4), counting(50, 4))


def test_the_latest_call_decides_whether_requests_wait_for_a_sleeping_engine() -> None:
    rig = Rig()
    for hold in (True, False):
        rig.call("sleep", 1, None, hold)
        assert rig.core.stats().is_kept_asleep is hold
    rig.add("a", 10)
    rig.call("wake_up")
    rig.run()
    assert rig.tokens["a"] == counting(10, 4)


def test_an_engine_of_which_one_worker_cannot_fall_asleep_is_awake_as_a_whole() -> None:
    rig = Rig(make_config({"fail_sleep": "worker 1 has no memory"}))
    rig.add("a", 10)
    with pytest.raises(RuntimeError, match="no memory"):
        rig.call("sleep", 1, "keep")
    assert not rig.call("is_sleeping")
    assert rig.core.model_executor.given_back == set()
    rig.run()
    assert rig.tokens["a"] == counting(10, 4)


def test_an_engine_that_fails_to_sleep_more_deeply_sleeps_on_and_wakes_up() -> None:
    rig = Rig()
    rig.call("sleep", 1)
    rig.call("wake_up", ["weights"])
    rig.core.model_executor.knobs["fail_sleep"] = "no"
    with pytest.raises(RuntimeError, match="no"):
        rig.call("sleep", 2)
    assert rig.core.stats().sleep_level == 1
    rig.call("wake_up")
    assert not rig.call("is_sleeping")
    assert rig.core.model_executor.given_back == set()


def test_an_engine_that_cannot_wake_up_sleeps_on() -> None:
    rig = Rig(make_config({"fail_wake_up": "no memory"}))
    rig.call("sleep")
    with pytest.raises(EngineStartError, match="no memory"):
        rig.call("wake_up")
    assert rig.call("is_sleeping")
    rig.add("a", 1)
    rig.run()
    assert rig.tokens["a"] == []


def test_wrong_arguments_change_nothing() -> None:
    rig = Rig()
    for method, *args in (
        ("pause_generation", "stop"),
        ("sleep", 3),
        ("sleep", True),
        ("sleep", 1, "stop"),
        ("sleep", 1, None, "yes"),
        ("wake_up", ["cache"]),
        ("wake_up", "weights"),
        ("start_profile", "x", 0),
    ):
        with pytest.raises(InvalidArgumentError):
            rig.call(method, *args)
    assert rig.core.scheduler.pause_state is PauseState.UNPAUSED


def test_a_profile_begins_and_ends_between_steps(rig: Rig) -> None:
    started, stopped = rig.call("start_profile", "d", 7), rig.call("stop_profile")
    rig.run()
    assert ("start_profile", "d", 7) in rig.core.model_executor.rpc_calls
    assert started is None or started.result(0) is None
    report = stopped.result(0) if isinstance(stopped, Future) else stopped
    assert (report.path, report.num_steps) == ("trace", 3)
    assert str(report) == "3 steps in trace\nsummary"


class ControlHistories(RuleBasedStateMachine):
    """Any order of requests, steps, pauses and sleeps; the fake executor fails if it has to compute asleep."""

    @initialize(executor=st.sampled_from(EXECUTORS), num_blocks=st.integers(6, 12), seqs=st.integers(1, 4))
    def start(self, executor: type[FakeExecutor], num_blocks: int, seqs: int) -> None:
        self.rig = Rig(make_config(num_blocks=num_blocks, max_num_seqs=seqs), executor)
        self.prompts: dict[str, tuple[int, int]] = {}
        self.futures: list[Future[Any]] = []

    def call(self, method: str, *args: Any) -> None:
        result = self.rig.call(method, *args)
        if isinstance(result, Future):
            self.futures.append(result)

    @rule(first=st.integers(0, 900), max_tokens=st.integers(1, 12))
    def add(self, first: int, max_tokens: int) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name] = first, max_tokens
        self.rig.add(name, first, max_tokens)

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(mode=st.sampled_from(PAUSE_MODES), clear_cache=st.booleans())
    def pause(self, mode: str, clear_cache: bool) -> None:
        self.call("pause_generation", mode, clear_cache)

    @rule()
    def resume(self) -> None:
        self.call("resume_generation")

    @rule(level=st.integers(1, 2), mode=st.sampled_from([None, *PAUSE_MODES]))
    def sleep(self, level: int, mode: str | None) -> None:
        with contextlib.suppress(UtilityError):
            self.call("sleep", level, mode)

    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"]]))
    def wake_up(self, tags: list[str] | None) -> None:
        self.call("wake_up", tags)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        self.call("reset_prefix_cache", running)

    @precondition(lambda self: getattr(self, "prompts", None))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.rig.core.abort_requests([name])
        self.rig.reasons.setdefault(name, FinishReason.ABORT)

    @invariant()
    def a_sleeping_engine_holds_nothing(self) -> None:
        if hasattr(self, "rig") and self.rig.core.stats().is_sleeping:
            stats = self.rig.core.stats()
            assert (stats.num_free_blocks, stats.num_cached_blocks) == (stats.num_blocks, 0)
            assert self.rig.core.scheduler.pause_state is PauseState.PAUSED_ALL

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        # Changes are made in order: what is asked for now comes after all others.
        self.call("resume_generation")
        self.call("wake_up", None)
        rig.run()
        rig.step()
        assert all(future.done() for future in self.futures)
        assert rig.core.scheduler.pause_state is PauseState.UNPAUSED
        for name, (first, max_tokens) in self.prompts.items():
            expected = [token % 1000 for token in counting(first, max_tokens)]
            if rig.reasons[name] is FinishReason.ABORT:
                assert rig.tokens[name] == expected[: len(rig.tokens[name])]
            else:
                assert rig.tokens[name] == expected
        rig.core.scheduler.check_integrity()
        assert rig.core.stats().num_free_blocks == rig.core.num_blocks


TestControlHistories = ControlHistories.TestCase
TestControlHistories.settings = settings(
    max_examples=amount(25, thorough=3000), stateful_step_count=40, deadline=None
)
