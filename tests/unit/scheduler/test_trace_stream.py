"""The trace tells of steps and requests in time and in few bytes; `test_trace_histories.py` has the
histories."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.metrics.trace import (
    BlocksCached,
    CacheCleared,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepContinued,
    StepDone,
    StepPlanned,
    TraceBatch,
    TraceEvent,
    TraceSnapshot,
)
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.output import Fault, ModelRunnerOutput
from nbengine.scheduler.request import Request
from nbengine.scheduler.scheduler import Scheduler
from nbengine.scheduler.trace_stream import TraceStream
from tests.unit.scheduler.short_histories import ABORTED, add, answer, make_scheduler
from tests.unit.scheduler.traced import compare_blocks, compare_request, over_the_wire


class Followed:
    """A scheduler, what is recorded of it, and a mirror."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.stream = TraceStream(scheduler, lambda: 5.0)
        self.mirror = TraceMirror(scheduler.engine_index)
        self.stream.record(True)
        self.snapshot()

    def snapshot(self) -> TraceSnapshot:
        *_, snapshot = self.stream.snapshot(5.0, self.scheduler.make_stats())
        assert isinstance(snapshot, TraceSnapshot)
        self.mirror.apply(over_the_wire(snapshot))
        return snapshot

    def take(self) -> list[TraceEvent]:
        batch = self.stream.take_batch(6.0, self.scheduler.make_stats())
        assert batch is not None
        assert self.mirror.apply(over_the_wire(batch))
        compare_blocks(self.mirror, self.scheduler)
        for request in self.scheduler.requests.values():
            compare_request(self.mirror.requests[request.number], request)
        return batch.events

    def step(self) -> None:
        answer(self.scheduler, self.scheduler.schedule())


def test_a_request_is_told_of_from_its_arrival_to_its_end() -> None:
    followed = Followed(make_scheduler(max_num_batched_tokens=8))
    add(followed.scheduler, "a", 10, start=100, client=7, priority=2, max_tokens=2)
    for _ in range(3):
        followed.step()
    prompt = list(range(100, 110))
    assert followed.take() == [
        RequestAdded(0, "a", 7, 5.0, 10, 12, prompt, 2),
        BlocksCached([0, 1], prompt[:8]),
        StepPlanned(0, 5.0, [0], [8], [0], [0], [(0, [0, 1])]),
        StepDone(0, 5.0),
        StepPlanned(1, 5.0, [0], [2], [8], [], [(0, [2])]),
        StepDone(1, 5.0),
        StepContinued(2, 5.0, []),
        StepDone(2, 5.0),
        RequestFinished(0, 5.0, "length"),
    ]
    view = followed.mirror.finished[0]
    assert (view.num_output_tokens, view.first_token_at, view.ended_at) == (2, 5.0, 5.0)
    assert [step.num_prefill_tokens for step in followed.mirror.steps] == [8, 2, 0]
    assert [list(step.finished) for step in followed.mirror.steps] == [[], [], [0]]


def test_a_step_like_the_one_before_takes_few_bytes_however_many_requests_there_are() -> None:
    followed = Followed(make_scheduler(num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=2000))
    for number in range(64):
        add(followed.scheduler, f"r{number}", 10, max_tokens=100)
    followed.step()
    followed.take()
    sizes = []
    for _ in range(3):
        followed.step()
        batch = followed.stream.take_batch(6.0, followed.scheduler.make_stats())
        assert batch is not None
        sizes.append(
            len(msgspec.msgpack.encode([e for e in batch.events if not isinstance(e, BlocksCached)]))
        )
    assert sizes[0] < 100
    assert sizes[2] < 1200, "64 requests get a block each"


def test_what_is_not_like_the_step_before_is_spelled_out() -> None:
    followed = Followed(make_scheduler())
    add(followed.scheduler, "a", 5)
    add(followed.scheduler, "b", 5)
    followed.step()
    followed.step()
    add(followed.scheduler, "c", 5)
    followed.step()
    followed.step()
    followed.scheduler.finish_requests("a", ABORTED)
    followed.step()
    followed.step()
    kinds = [type(event) for event in followed.take() if isinstance(event, StepPlanned | StepContinued)]
    assert kinds == [StepPlanned, StepContinued, StepPlanned, StepContinued, StepPlanned, StepContinued]


def test_a_request_with_a_fault_has_got_no_token() -> None:
    followed = Followed(make_scheduler())
    for name in "ab":
        add(followed.scheduler, name, 5)
    followed.step()
    plan = followed.scheduler.schedule()
    outcome = ModelRunnerOutput(["a", "b"], [[], [7]], faults={"a": Fault.NOT_FINITE})
    followed.scheduler.update_from_output(plan, outcome)
    followed.take()
    assert [step.num_sampled for step in followed.mirror.steps] == [2, 1]
    assert followed.mirror.finished[0].num_output_tokens == 1
    assert followed.mirror.requests[1].num_output_tokens == 2


def test_a_request_that_resumes_does_not_go_on_where_it_was() -> None:
    followed = Followed(make_scheduler(max_num_batched_tokens=1))
    add(followed.scheduler, "a", 5)
    followed.step()
    followed.step()
    assert followed.scheduler.reset_prefix_cache(reset_running_requests=True)
    followed.step()
    planned = [event for event in followed.take() if isinstance(event, StepPlanned | StepContinued)]
    assert [type(event) for event in planned] == [StepPlanned, StepContinued, StepPlanned]
    assert [list(step.num_computed) for step in followed.mirror.steps] == [[0], [1], [0]]


def test_a_step_under_way_at_a_snapshot_is_spelled_out_when_it_ends() -> None:
    followed = Followed(make_scheduler(ahead=True))
    add(followed.scheduler, "a", 5)
    add(followed.scheduler, "b", 40)
    first = followed.scheduler.schedule()
    second = followed.scheduler.schedule()
    followed.scheduler.finish_requests("b", ABORTED)
    followed.snapshot()
    answer(followed.scheduler, first)
    third = followed.scheduler.schedule()
    answer(followed.scheduler, second)
    answer(followed.scheduler, third)
    done = [event for event in followed.take() if isinstance(event, StepDone)]
    assert done == [
        StepDone(0, 5.0, [1, 0], [0, -1]),
        StepDone(1, 5.0, [1, 0], [0, -1]),
        StepDone(2, 5.0),
    ]
    assert followed.mirror.requests[0].num_output_tokens == 3


def test_pooling_requests_and_those_that_compute_get_what_they_got() -> None:
    followed = Followed(make_scheduler(max_num_batched_tokens=10))
    params = PoolingParams(task="embed", pooling="mean")
    followed.scheduler.add_request(Request("p", list(range(15)), None, pooling_params=params))
    add(followed.scheduler, "g", 3, max_tokens=2)
    for _ in range(3):
        plan = followed.scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        done = [name for name in names if name not in plan.incomplete_req_ids]
        output = ModelRunnerOutput(
            names,
            [[7] if name == "g" and name in done else [] for name in names],
            pooler_output={"p": np.ones(2, np.float32)} if "p" in done else None,
        )
        followed.scheduler.update_from_output(plan, output)
        followed.take()
    pooled, generated = (followed.mirror.finished[number] for number in range(2))
    assert (pooled.added.is_pooling, pooled.num_output_tokens, pooled.finish_reason) == (True, 0, "stop")
    assert (generated.num_output_tokens, generated.finish_reason) == (2, "length")
    assert [step.num_sampled for step in followed.mirror.steps] == [0, 1, 1]
    assert [step.num_prefill_tokens for step in followed.mirror.steps] == [10, 8, 0]


def test_a_model_without_a_kv_cache_is_followed() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, enable_chunked_prefill=False)
    scheduler = Scheduler(config, CacheConfig(block_size=4, enable_prefix_caching=False), 0, 32)
    followed = Followed(scheduler)
    params = PoolingParams(task="embed", pooling="mean")
    scheduler.add_request(Request("p", [1, 2, 3], None, pooling_params=params))
    plan = scheduler.schedule()
    followed.take()
    scheduler.update_from_output(
        plan, ModelRunnerOutput(["p"], [[]], pooler_output={"p": np.ones(2, np.float32)})
    )
    followed.take()
    assert followed.mirror.blocks.num_blocks == 0
    assert followed.mirror.finished[0].finish_reason == "stop"


def test_a_prompt_of_embeddings_has_no_tokens_to_show() -> None:
    followed = Followed(make_scheduler())
    request = Request("e", [0] * 5, SamplingParams(max_tokens=9), prompt_embeds=object())
    followed.scheduler.add_request(request)
    (added,) = followed.take()
    assert isinstance(added, RequestAdded)
    assert (added.num_prompt_tokens, added.prompt_token_ids) == (5, [])
    for _ in range(4):
        followed.step()
    followed.take()
    late = TraceMirror(3)
    late.apply(over_the_wire(followed.snapshot()))
    for mirror in (followed.mirror, late):
        blocks = mirror.blocks
        assert sorted(blocks.token_ids[blocks.cached].tolist()) == [[-1] * 4, [-1, 7, 7, 7]]


def test_only_the_beginning_of_a_prompt_is_published() -> None:
    followed = Followed(make_scheduler(num_blocks=100, max_model_len=300))
    add(followed.scheduler, "a", 200, start=1)
    (added,) = followed.take()
    assert isinstance(added, RequestAdded)
    assert added.prompt_token_ids == list(range(1, 65))


def test_a_preemption_and_a_reset_are_told_in_their_order() -> None:
    followed = Followed(make_scheduler())
    add(followed.scheduler, "a", 9)
    followed.step()
    followed.take()
    assert followed.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert followed.take() == [RequestPreempted(0), CacheCleared()]
    followed.step()
    *_, planned, _ = followed.take()
    # All ten tokens, the last of which is not computed again but for the first time.
    assert planned == StepPlanned(1, 5.0, [0], [10], [0], [0], [(0, planned.new_blocks[0][1])])
    step = followed.mirror.steps[-1]
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (9, 1)
    assert (list(step.preempted), list(step.resumed)) == ([0], [0])


def test_a_snapshot_knows_the_tokens_of_held_blocks_and_of_those_that_were_stored_meanwhile() -> None:
    scheduler = make_scheduler()
    add(scheduler, "before", 9, start=50)
    answer(scheduler, scheduler.schedule())
    scheduler.finish_requests("before", ABORTED)
    add(scheduler, "held", 9, start=100)
    answer(scheduler, scheduler.schedule())
    followed = Followed(scheduler)
    add(scheduler, "meanwhile", 9, start=150)
    followed.step()
    scheduler.finish_requests("meanwhile", ABORTED)
    followed.take()
    snapshot = followed.snapshot()
    assert len(snapshot.cached.block_ids) == 6
    late = TraceMirror(3)
    assert late.apply(over_the_wire(snapshot))
    rows = sorted(late.blocks.token_ids[late.blocks.cached].tolist())
    tokens = [list(range(start, start + 4)) for start in (100, 104, 150, 154)]
    assert rows == [[-1] * 4] * 2 + tokens
    assert late.blocks.cached.sum() == 6


def test_nothing_is_recorded_while_nobody_wants_it_and_what_was_not_taken_is_dropped() -> None:
    scheduler = make_scheduler()
    stream = TraceStream(scheduler)
    add(scheduler, "a", 9)
    assert not stream.has_events
    assert stream.take_batch(1.0, scheduler.make_stats(), even_if_empty=True) is None
    stream.record(True)
    stream.record(True)
    assert len(scheduler.kv_cache_manager.block_pool.observers) == 1
    answer(scheduler, scheduler.schedule())
    assert stream.has_events
    stream.record(False)
    assert not stream.has_events
    assert scheduler.observer is None
    assert scheduler.kv_cache_manager.block_pool.observers == ()
    stream.record(True)
    (snapshot,) = stream.snapshot(1.0, scheduler.make_stats())
    # It is one more: a follower that knew the state before it was turned off does not know what came after.
    assert (snapshot.seq, len(snapshot.requests)) == (1, 1)
    empty = stream.take_batch(1.0, scheduler.make_stats(), even_if_empty=True)
    assert isinstance(empty, TraceBatch)
    assert (empty.seq, empty.events) == (2, [])


def test_the_time_of_an_arrival_before_the_recording_is_that_of_the_wall_clock() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 5)
    stream = TraceStream(scheduler, clock=lambda: 1000.0)
    stream.record(True)
    # What is passed may be older.
    (snapshot,) = stream.snapshot(990.0, scheduler.make_stats())
    assert isinstance(snapshot, TraceSnapshot)
    elapsed = scheduler.clock() - 1 - request.queued_at
    assert snapshot.requests[0].added.time == pytest.approx(1000.0 - elapsed)
