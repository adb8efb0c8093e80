"""DPEngineCoreProc on the test's thread, alone or with the others played by an executor; process tests have several."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import msgspec
import pytest
import zmq

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from nbengine.engine.core import core_proc
from nbengine.engine.core.dp_core_proc import DPEngineCoreProc
from nbengine.engine.core.waves import WAVE_AGREEMENT_STEPS
from nbengine.engine.core.work import COORDINATOR_INDEX, AddRequest, StartWave
from nbengine.ipc.control_messages import (
    ChangeGroup,
    CoreToHost,
    EngineHandshakeMetadata,
    GroupChanged,
    WantEvents,
)
from nbengine.ipc.handshake import ControlDecoder
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.trace import RequestFinished, StepDone, TraceBatch
from nbengine.sampling_params import SamplingParams
from tests.process.process_support.fake_executor import AsyncFakeExecutor, FakeExecutor

Others = Callable[[bool], bool]


class _Records:
    """Notes its calls when they are made, though a thread may answer later; what the other cores answer to questions
    is `others`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []
        self.others: Others = bool

    def execute_model(self, scheduler_output, *, non_block=False):
        if scheduler_output.total_num_scheduled_tokens:
            self.calls.append("batch")
        return super().execute_model(scheduler_output, non_block=non_block)

    def execute_dummy_batch(self):
        self.calls.append("dummy")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def all_reduce_unfinished(self, unfinished):
        self.calls.append("question")
        return unfinished or self.others(unfinished)

    most_steps = 1

    def reconfigure_data_parallel(self, before, after, init_method):
        # One core alone may compute several steps at once.
        self.most_steps = 8 if after == 1 else 1
        self.calls.append(f"{before} to {after} at {init_method}")


class OneBatch(_Records, FakeExecutor):
    """One step at a time."""


class TwoBatches(_Records, AsyncFakeExecutor):
    """Two steps in flight."""


class Rig:
    """A core whose sockets lead to the test."""

    def __init__(
        self, executor: type[FakeExecutor], num_ranks: int, rank: int, *, joins_later: bool = False
    ) -> None:
        self.context = zmq.Context()
        self.host = make_socket(self.context, "inproc://control", zmq.PAIR, bind=True)
        self.control = make_socket(self.context, "inproc://control", zmq.PAIR, bind=False)
        self.coordinator = make_socket(self.context, "inproc://coordinator", zmq.PULL, bind=True)
        self.waves = make_socket(self.context, "inproc://waves", zmq.XPUB, bind=True)
        config = EngineConfig(
            model=ModelConfig("fake", is_moe=True),
            cache=CacheConfig(num_gpu_blocks_override=32),
            parallel=ParallelConfig(
                data_parallel_size=num_ranks, data_parallel_rank=rank, data_parallel_joins_later=joins_later
            ),
        )
        handshake = EngineHandshakeMetadata("inproc://waves", "inproc://coordinator")
        self.core = DPEngineCoreProc(config, executor, rank, self.context, self.control, handshake)
        self.executor = self.core.model_executor

    def add(self, request_id: str, max_tokens: int) -> None:
        request = EngineCoreRequest(request_id, [1], SamplingParams(max_tokens=max_tokens), client_index=1)
        self.core.input_queue.put(AddRequest(*self.core.preprocess_add_request(request)))

    def run(self, until: Callable[[], bool]) -> None:
        """Turn the loop until something holds."""
        for _ in range(1000):
            if until():
                return
            self.core._process_input_queue()
            self.core._process_engine_step()
        raise AssertionError("it does not come to that")

    def told(self) -> list[EngineCoreOutputs]:
        """Take what the coordinator has been told of waves."""
        news = []
        while not self.core.output_queue.empty():
            item = self.core.output_queue.get()
            if isinstance(item, tuple) and item[0] == COORDINATOR_INDEX:
                news.append(item[1])
        return [item for item in news if item.wave_complete is not None or item.start_wave is not None]

    def close(self) -> None:
        self.core.stop_io()
        self.core.shutdown()
        self.context.destroy(linger=0)


@pytest.fixture(params=[OneBatch, TwoBatches])
def make_rig(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(num_ranks: int, rank: int = 0, **kwargs) -> Rig:
        rigs.append(Rig(request.param, num_ranks, rank, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
    gc.unfreeze()


def test_a_core_alone_asks_nobody_and_computes_nothing_but_its_requests(make_rig) -> None:
    rig = make_rig(1)
    rig.add("a", 5)
    rig.run(lambda: rig.core.waves.wave == 1)
    assert rig.executor.calls == ["batch"] * 5
    assert [(item.start_wave, item.wave_complete) for item in rig.told()] == [(0, None), (None, 0)]


def test_the_calls_of_a_wave_do_not_depend_on_what_the_core_has_to_do(make_rig) -> None:
    busy, helper = make_rig(2), make_rig(2, rank=1)
    busy.add("a", WAVE_AGREEMENT_STEPS + 5)
    helper.core.input_queue.put(StartWave(0))
    agreements = iter([False, True, False])
    helper.executor.others = lambda _: next(agreements)
    for rig in (busy, helper):
        rig.run(lambda rig=rig: rig.core.waves.wave == 1)
    kinds = [
        ["question" if call == "question" else "batch" for call in rig.executor.calls]
        for rig in (busy, helper)
    ]
    turns = ["batch"] * WAVE_AGREEMENT_STEPS
    assert kinds[0] == kinds[1] == ["question", *turns, "question", *turns, "question"]
    assert busy.executor.calls.count("batch") == WAVE_AGREEMENT_STEPS + 5
    assert helper.core.stats().num_dummy_steps == 2 * WAVE_AGREEMENT_STEPS
    assert [(item.start_wave, item.wave_complete) for item in busy.told()] == [(0, None), (None, 0)]
    assert helper.told() == []


def test_statistics_say_where_in_the_wave_the_core_is(make_rig) -> None:
    rig = make_rig(2)
    rig.executor.others = lambda _: False
    rig.add("a", 3)
    rig.run(lambda: rig.core.waves.num_turns == 2)
    stats = rig.core.stats()
    assert (stats.current_wave, stats.step_counter, stats.engines_running) == (0, 2, True)
    rig.run(lambda: not rig.core.waves.running)
    stats = rig.core.stats()
    assert (stats.current_wave, stats.step_counter, stats.engines_running) == (1, 0, False)


def test_each_turn_is_reported(make_rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_proc.time, "monotonic", lambda: 100.0)
    rig = make_rig(2)
    rig.executor.others = lambda _: False
    rig.add("a", 6)
    rig.run(lambda: rig.core.waves.num_turns == 6)
    turns = []
    while not rig.core.output_queue.empty():
        item = rig.core.output_queue.get()
        stats = item[1].scheduler_stats if isinstance(item, tuple) else None
        turns += [] if stats is None else [stats.step_counter]
    assert set(turns) >= {1, 2, 3, 4, 5, 6}


def test_the_trace_of_what_ends_in_a_wave_is_published_before_the_wave_ends(make_rig) -> None:
    rig = make_rig(2)
    rig.executor.others = lambda _: False
    rig.core.input_queue.put(WantEvents("trace", True))
    rig.add("a", 3)
    rig.run(lambda: rig.executor.calls.count("dummy") == 4)
    assert rig.core.waves.running
    assert not rig.core.trace.has_events
    events = []
    while not rig.core.output_queue.empty():
        item = rig.core.output_queue.get()
        events += item.events if isinstance(item, TraceBatch) else []
    assert [type(event) for event in events].count(StepDone) == 3
    assert isinstance(events[-1], RequestFinished | StepDone)
    assert any(isinstance(event, RequestFinished) for event in events)


def test_a_newcomer_joins_with_the_wave_of_the_others(make_rig) -> None:
    rig = make_rig(2, rank=1, joins_later=True)
    rig.core.start()
    rig.host.recv()
    rig.add("early", 3)
    rig.core.input_queue.put(ChangeGroup(1, 2, "there"))
    # The others are at wave 5.
    bits = iter([*[False] * 37, True, False, True])
    rig.executor.others = lambda _: next(bits, False)
    rig.run(lambda: rig.core.waves.has_joined)
    assert rig.core.waves.wave == 5
    assert rig.executor.calls[0] == "1 to 2 at there"
    assert "batch" not in rig.executor.calls
    assert rig.host.poll(60_000)
    while not isinstance(message := ControlDecoder(CoreToHost).decode(rig.host.recv()), GroupChanged):
        assert rig.host.poll(60_000)
    assert message == GroupChanged(1, 2)
    rig.run(lambda: rig.core.waves.wave == 6)
    assert rig.executor.calls.count("batch") == 3


def test_a_core_that_leaves_finishes_its_requests_first(make_rig) -> None:
    rig = make_rig(2, rank=1)
    rig.core.start()
    rig.add("a", 40)
    rig.run(lambda: rig.core.waves.num_turns == 3)
    rig.core.input_queue.put(ChangeGroup(2, 1, "there"))
    rig.core.request_shutdown(drain=True, requeue=True)
    # The other one has no work, and is ready.
    rig.executor.others = lambda _: False
    rig.core.run_busy_loop()
    assert rig.executor.calls.count("batch") == 40
    assert rig.executor.calls[-1] == "2 to 1 at there"


def test_a_core_that_is_alone_now_may_compute_several_steps_at_once_and_one_of_several_may_not(
    make_rig,
) -> None:
    rig = make_rig(2, rank=0)
    rig.core.start()
    rig.executor.others = lambda _: False
    for before, after, expected in ((2, 1, 8), (1, 2, 1)):
        rig.core.input_queue.put(ChangeGroup(before, after, "there"))
        rig.run(lambda size=after: rig.core.waves.num_ranks == size)
        rig.core._pace.took(1e-6, 1)
        assert rig.core._pace.allowed.most == expected


def test_what_is_no_start_of_a_wave_is_dropped(make_rig, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(2, rank=1)
    rig.core.start()
    assert rig.waves.poll(60_000)
    assert rig.waves.recv() == b"\x01" + EngineCoreRequestType.START_DP_WAVE.value
    kind = EngineCoreRequestType.START_DP_WAVE.value
    for payload in ([], [b"\xc1"], [msgspec.msgpack.encode("x")], [msgspec.msgpack.encode((1,))]):
        rig.waves.send_multipart([kind, *payload])
    # One that this core is left out of, and one that it is not.
    for wave, exclude_rank in ((7, 1), (0, -1)):
        rig.waves.send_multipart([kind, msgspec.msgpack.encode((wave, exclude_rank))])
    assert rig.core.input_queue.get(timeout=60) == StartWave(0)
    assert caplog.text.count("dropped a message of the coordinator") == 4
