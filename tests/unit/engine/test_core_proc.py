"""EngineCoreProc on the test's thread: what it says at the start, and how its loop ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import zmq

from nbengine.config import CacheConfig, EngineConfig, ModelConfig
from nbengine.engine import core_proc
from nbengine.engine.core_proc import EngineCoreProc, EngineShutdownState
from nbengine.engine.work import COORDINATOR_INDEX, AddRequest, ThreadFailed, Wakeup
from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.ipc.control_messages import (
    CoreToHost,
    EngineHandshakeMetadata,
    EngineReady,
    Progress,
    ShutdownEngine,
    WantEvents,
)
from nbengine.ipc.handshake import ControlDecoder
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityRequest
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.trace import RequestAdded, RequestFinished, TraceBatch, TraceSnapshot
from nbengine.sampling_params import SamplingParams
from tests.process.process_support.fake_executor import FakeExecutor


class Rig:
    """An engine core whose control socket leads to the test."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.host = make_socket(self.context, "inproc://control", zmq.PAIR, bind=True)
        self.control = make_socket(self.context, "inproc://control", zmq.PAIR, bind=False)
        self.coordinator = make_socket(self.context, "inproc://coordinator", zmq.PULL, bind=True)
        config = EngineConfig(model=ModelConfig("fake"), cache=CacheConfig(num_gpu_blocks_override=32))
        handshake = EngineHandshakeMetadata("", "inproc://coordinator")
        self.core = EngineCoreProc(config, FakeExecutor, 2, self.context, self.control, handshake)

    def add(self, request_id: str, client_index: int = 1, max_tokens: int = 5) -> None:
        request = EngineCoreRequest(
            request_id, [1], SamplingParams(max_tokens=max_tokens), client_index=client_index
        )
        self.core.input_queue.put(AddRequest(*self.core.preprocess_add_request(request)))

    def hear(self):
        decoder = ControlDecoder(CoreToHost)
        messages = []
        while self.host.poll(0):
            messages.append(decoder.decode(self.host.recv()))
        return messages

    def outputs(self) -> list[tuple[int, EngineCoreOutputs]]:
        """What has been queued for clients."""
        items = []
        while not self.core.output_queue.empty():
            items.append(self.core.output_queue.get())
        return [item for item in items if isinstance(item, tuple) and item[0] != COORDINATOR_INDEX]

    def close(self) -> None:
        self.core.stop_io()
        for socket in (self.host, self.control, self.coordinator):
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()
    gc.unfreeze()


def test_progress_and_ready_carry_the_rank(rig: Rig) -> None:
    rig.core.start()
    *progress, ready = rig.hear()
    assert [(type(message), message.rank) for message in progress] == [(Progress, 2)] * len(progress)
    assert {message.stage for message in progress} == {"load", "profile", "kv"}
    assert isinstance(ready, EngineReady)
    assert (ready.rank, ready.num_blocks) == (2, 32)


def test_a_failed_thread_ends_the_loop_with_its_error_as_the_cause(rig: Rig) -> None:
    root = ValueError("root")
    rig.core.input_queue.put(ThreadFailed("nbengine-input", root))
    with pytest.raises(NBEngineError, match="the nbengine-input thread failed") as caught:
        rig.core.run_busy_loop()
    assert caught.value.__cause__ is root


def test_workers_that_end_by_themselves_end_an_idle_loop_with_their_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callbacks = []
    monkeypatch.setattr(
        FakeExecutor, "register_failure_callback", lambda _, callback: callbacks.append(callback)
    )
    rig = Rig()
    death = EngineDeadError("worker 1 (TP1), pid 7, exited with status 3", "its last line")
    watcher = threading.Timer(0.05, lambda: callbacks[0](death))
    watcher.start()
    with pytest.raises(EngineDeadError) as caught:
        rig.core.run_busy_loop()
    assert caught.value is death
    watcher.join()
    rig.close()


def test_an_end_at_once_aborts_what_runs_and_tells_its_clients(rig: Rig) -> None:
    rig.add("a", client_index=1)
    rig.add("b", client_index=2)
    rig.core._process_input_queue()
    rig.core.request_shutdown()
    rig.core.run_busy_loop()
    told = {client: batch.outputs for client, batch in rig.outputs()}
    assert {client: [o.request_id for o in outputs] for client, outputs in told.items()} == {
        1: ["a"],
        2: ["b"],
    }
    assert {o.finish_reason for outputs in told.values() for o in outputs} == {FinishReason.ABORT}
    assert rig.core.shutdown_state is EngineShutdownState.SHUTTING_DOWN


def test_a_drain_finishes_what_runs_and_refuses_what_comes(rig: Rig) -> None:
    rig.add("runs")
    rig.core._process_input_queue()
    rig.core.request_shutdown(drain=True)
    rig.add("late")
    rig.core.run_busy_loop()
    outputs = [output for _, batch in rig.outputs() for output in batch.outputs]
    tokens = [token for output in outputs if output.request_id == "runs" for token in output.new_token_ids]
    assert tokens == [2, 3, 4, 5, 6]
    (late,) = [output for output in outputs if output.request_id == "late"]
    assert (late.finish_reason, late.error) == (FinishReason.ERROR, "the engine is shutting down")


def returned(rig: Rig) -> tuple[dict[int, list[str]], dict[str, int]]:
    """What clients got back, and how many tokens each request has brought."""
    back: dict[int, list[str]] = {}
    tokens: dict[str, int] = {}
    for client, batch in rig.outputs():
        back.setdefault(client, []).extend(batch.returned or ())
        for output in batch.outputs:
            assert output.error is None
            tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.new_token_ids)
    return {client: names for client, names in back.items() if names}, tokens


def test_a_core_that_leaves_finishes_what_runs_and_hands_back_the_rest(rig: Rig) -> None:
    rig.core.scheduler.max_num_seqs = 1
    rig.add("runs", client_index=1)
    rig.add("waits", client_index=2)
    rig.core._process_input_queue()
    rig.core._process_engine_step()
    rig.core.input_queue.put(ShutdownEngine(drain=True, requeue=True))
    rig.add("late", client_index=1)
    rig.core.run_busy_loop()
    back, tokens = returned(rig)
    assert back == {1: ["late"], 2: ["waits"]}
    assert tokens == {"runs": 5}


def test_a_core_that_leaves_is_not_held_by_a_pause(rig: Rig) -> None:
    rig.add("runs")
    rig.core._process_input_queue()
    rig.core._process_engine_step()
    rig.core.call_utility("pause_generation", ["keep"])
    rig.add("waits")
    rig.core.input_queue.put(ShutdownEngine(drain=True, requeue=True))
    rig.core.run_busy_loop()
    assert returned(rig) == ({1: ["waits"]}, {"runs": 5})


def test_a_sleeping_core_that_leaves_hands_back_what_waits_and_aborts_what_it_cannot_finish(rig: Rig) -> None:
    rig.add("runs")
    rig.core._process_input_queue()
    rig.core._process_engine_step()
    rig.core.call_utility("sleep", [1, "keep"])
    rig.add("waits")
    rig.core.input_queue.put(ShutdownEngine(drain=True, requeue=True))
    rig.core.run_busy_loop()
    outputs = [output for _, batch in rig.outputs() for output in batch.outputs]
    assert [(o.request_id, o.finish_reason) for o in outputs[-1:]] == [("runs", FinishReason.ABORT)]


def test_an_end_at_once_comes_before_leaving(rig: Rig) -> None:
    rig.add("runs", max_tokens=30)
    rig.core._process_input_queue()
    rig.core._process_engine_step()
    rig.core.input_queue.put(ShutdownEngine(drain=True, requeue=True))
    rig.core._process_input_queue()
    rig.core.input_queue.put(ShutdownEngine())
    rig.add("late")
    rig.core.run_busy_loop()
    outputs = [output for _, batch in rig.outputs() for output in batch.outputs]
    ends = {output.request_id: output.finish_reason for output in outputs}
    assert ends == {"runs": FinishReason.ABORT, "late": FinishReason.ERROR}


def test_an_idle_engine_forgets_eager_aborts_and_publishes_its_state(rig: Rig) -> None:
    rig.core.aborts_queue.put((1, ["gone"]))
    rig.core.input_queue.put(UtilityRequest(1, 5, "ping", []))
    rig.core.input_queue.put(Wakeup())
    rig.add("r")
    rig.core._process_input_queue()
    assert rig.core.aborts_queue.empty()
    queued = []
    while not rig.core.output_queue.empty():
        queued.append(rig.core.output_queue.get())
    assert queued[0][0] == COORDINATOR_INDEX
    assert queued[0][1].scheduler_stats.num_free_blocks == 32
    assert [batch.utility_output.result for client, batch in queued if client == 1] == ["pong"]


def trace_of(rig: Rig) -> list[TraceBatch | TraceSnapshot]:
    """What has been queued under the trace's topic."""
    found = []
    while not rig.core.output_queue.empty():
        item = rig.core.output_queue.get()
        if isinstance(item, TraceBatch | TraceSnapshot):
            found.append(item)
    return found


def test_the_trace_gathers_while_the_core_is_busy_and_is_complete_when_it_rests(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(core_proc.time, "monotonic", lambda: now[0])
    core, interval = rig.core, core_proc.TRACE_INTERVAL
    core.input_queue.put(WantEvents("trace", True))
    rig.add("a", max_tokens=6)
    core._process_input_queue()
    snapshot, at_rest = trace_of(rig)
    assert isinstance(snapshot, TraceSnapshot)
    assert (at_rest.seq, at_rest.events) == (1, [])
    assert (snapshot.seq, snapshot.requests, snapshot.stats.num_waiting_reqs) == (0, [], 0)
    seqs = []
    for elapsed in (0.0, 0.5, 0.4, 0.2, 0.0, 0.1):
        now[0] += elapsed * interval
        core._process_engine_step()
        seqs.append([message.seq for message in trace_of(rig)])
    assert seqs == [[], [], [], [2], [], []]
    core.input_queue.put(Wakeup())
    core.input_queue.put(UtilityRequest(1, 5, "ping", []))
    rig.add("b")
    while core.has_work():
        core._process_engine_step()
    core._process_input_queue()
    last, *rest = trace_of(rig)
    assert isinstance(last, TraceBatch)
    assert any(isinstance(event, RequestFinished) for event in last.events)
    assert (last.stats.num_free_blocks, last.stats.num_running_reqs) == (32, 0)
    assert [message.seq for message in (last, *rest)] == list(range(3, 4 + len(rest)))


def test_a_snapshot_comes_after_all_that_it_has_in_it_and_the_end_of_a_core_is_published(rig: Rig) -> None:
    core = rig.core
    core.input_queue.put(WantEvents("trace", True))
    rig.add("a", max_tokens=30)
    core.input_queue.put(WantEvents("trace", True))
    core._process_input_queue()
    first, _, added, second = trace_of(rig)
    assert (first.seq, added.seq, second.seq) == (0, 2, 2)
    assert [type(event) for event in added.events] == [RequestAdded]
    assert isinstance(second, TraceSnapshot)
    assert [request.added.request_id for request in second.requests] == ["a"]
    core._process_engine_step()
    core.input_queue.put(ShutdownEngine())
    core.run_busy_loop()
    ends = [event for batch in trace_of(rig) for event in batch.events if isinstance(event, RequestFinished)]
    assert [event.reason for event in ends] == ["abort"]
    core.input_queue.put(WantEvents("trace", False))
    core._handle(core.input_queue.get())
    assert core.scheduler.observer is None


def test_a_utility_that_breaks_is_answered_and_logged(rig: Rig, caplog) -> None:
    rig.core.input_queue.put(UtilityRequest(1, 5, "ping", ["superfluous"]))
    rig.add("r")
    rig.core._process_input_queue()
    ((_, batch),) = rig.outputs()
    assert batch.utility_output.failure_message.startswith("TypeError")
    assert "utility call ping failed" in caplog.text
