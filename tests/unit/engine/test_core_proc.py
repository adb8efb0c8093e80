"""EngineCoreProc on the test's thread: what it says at the start, and how its loop ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import zmq

from nbengine.config import CacheConfig, EngineConfig, ModelConfig
from nbengine.engine.core import core_proc
from nbengine.engine.core.activity import Activity, PulseThread
from nbengine.engine.core.core_proc import REQUESTS_A_STEP, EngineCoreProc, EngineShutdownState
from nbengine.engine.core.work import COORDINATOR_INDEX, AbortRequests, AddRequest, ThreadFailed, Wakeup
from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.ipc.control_messages import (
    CoreToHost,
    DetachClient,
    EngineHandshakeMetadata,
    EngineReady,
    Progress,
    Pulse,
    ShutdownEngine,
    WantEvents,
    WorkerPulse,
)
from nbengine.ipc.handshake import ControlDecoder
from nbengine.ipc.liveness import ProcessState
from nbengine.ipc.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityRequest,
    rank_of_peer,
)
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.stats import SchedulerStats
from nbengine.metrics.trace import RequestAdded, RequestFinished, TraceBatch, TraceSnapshot
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.pause import PauseState
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

    def add(
        self, request_id: str, client_index: int = 1, max_tokens: int = 5, output_interval: float = 0.0
    ) -> None:
        request = EngineCoreRequest(
            request_id,
            [1],
            SamplingParams(max_tokens=max_tokens),
            client_index=client_index,
            output_interval=output_interval,
        )
        self.core.input_queue.put(AddRequest(*self.core.preprocess_add_request(request)))

    def hear(self):
        decoder = ControlDecoder(CoreToHost)
        messages = []
        while self.host.poll(0):
            messages.append(decoder.decode(self.host.recv()))
        return messages

    def outputs(self) -> list[tuple[int, EngineCoreOutputs]]:
        """Take what has been queued for clients."""
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
    assert late.is_unavailable


def returned(rig: Rig) -> tuple[dict[int, list[str]], dict[str, int]]:
    """Return what clients got back, and how many tokens each request has brought."""
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


def told(rig: Rig) -> list[tuple[str, int, FinishReason | None]]:
    """Take what clients are told: requests, with the number of tokens and the end."""
    outputs = [output for _, batch in rig.outputs() for output in batch.outputs]
    return [(each.request_id, len(each.new_token_ids), each.finish_reason) for each in outputs]


@pytest.mark.parametrize("clear_cache", [False, True])
def test_tokens_that_are_held_are_told_before_the_core_rests(rig: Rig, clear_cache: bool) -> None:
    rig.add("r", max_tokens=9, output_interval=1e9)
    rig.core._process_input_queue()
    for _ in range(3):
        rig.core._process_engine_step()
    assert told(rig) == [("r", 1, None)]
    rig.core.call_utility("pause_generation", ["keep", clear_cache])
    while rig.core.has_work():
        rig.core._process_engine_step()
    rig.core.input_queue.put(UtilityRequest(1, 5, "resume_generation", []))
    rig.core._process_input_queue()
    assert told(rig)[0] == ("r", 2, None)
    rig.core._process_engine_step()
    # A request that was preempted tells that with its next token.
    assert told(rig) == ([("r", 1, None)] if clear_cache else [])
    rig.core._process_engine_step()
    rig.core.abort_all("enough")
    rig.core._send_unsent_outputs()
    assert told(rig) == [("r", 1 if clear_cache else 2, FinishReason.ABORT)]


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
    """Take what has been queued under the trace's topic."""
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


def test_what_the_core_is_in_and_counts_is_seen_from_another_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, bool]] = []
    activity, core = rig.core._activity, rig.core
    counted = activity.turns

    def look() -> None:
        nonlocal counted
        seen.append((activity.doing, activity.detail, activity.turns > counted))
        counted = activity.turns

    run, get = core.model_executor.run, core.input_queue.get
    monkeypatch.setattr(core.model_executor, "run", lambda plan: (look(), run(plan))[1])
    monkeypatch.setitem(core._utilities, "ping", look)

    class Queue:
        """Looks where the busy loop waits."""

        def get(self):
            look()
            if len(seen) > 5:
                core.request_shutdown()
            return get()

        def __getattr__(self, name: str):
            return getattr(queue, name)

    queue, core.input_queue = core.input_queue, Queue()
    rig.add("a", max_tokens=2)
    core.input_queue.put(UtilityRequest(1, 1, "ping", []))
    assert (activity.doing, activity.detail) == (
        "load",
        "loading (kv: 32 blocks of 16 tokens, max_model_len 512)",
    )
    core.run_busy_loop()
    assert seen == [
        ("idle", "waiting for work", True),
        ("call", "in the call ping", True),
        ("step", "in step 1", True),
        ("step", "in step 2", True),
        ("step", "in step 3", True),
        ("idle", "waiting for work", True),
    ]


def test_a_load_that_says_the_same_again_makes_no_progress() -> None:
    activity = Activity()
    for fraction in (0.5, 0.5, 0.6):
        activity.load(Progress("load", "weights", fraction))
    assert (activity.turns, activity.detail) == (2, "loading (load: weights)")


def test_pulses_come_while_the_busy_loop_stands_and_carry_what_workers_count() -> None:
    activity = Activity()
    activity.begin("call", "sleep")
    activity.workers = lambda: [WorkerPulse(0, 7, True, ProcessState.STOPPED)]
    with zmq.Context() as context:
        host = make_socket(context, "inproc://pulses", zmq.ROUTER, bind=True)
        thread = PulseThread(context, "inproc://pulses", 300, 2, 0.01, activity)
        thread.start()
        identity, frame = host.recv_multipart()
        thread.stop()
        host.close()
    assert rank_of_peer(identity) == 300
    expected = Pulse(2, 1, "call", "in the call sleep", [WorkerPulse(0, 7, True, ProcessState.STOPPED)])
    assert ControlDecoder(CoreToHost).decode(frame) == expected


# More than a step takes in.


@pytest.fixture
def flooded(rig: Rig) -> Rig:
    """Let client 1 ask for far more than a step takes in."""
    for number in range(3 * REQUESTS_A_STEP):
        rig.add(f"many{number}", client_index=1)
    return rig


def clients_with_requests(rig: Rig) -> list[int]:
    return [request.client_index for request in rig.core.scheduler.requests.values()]


def test_a_flood_of_one_client_keeps_another_waiting_for_one_step_at_most(flooded: Rig) -> None:
    flooded.add("one", client_index=2)
    flooded.core._process_input_queue()
    # An idle core handles what has woken it, besides.
    assert len(clients_with_requests(flooded)) == 1 + REQUESTS_A_STEP
    assert clients_with_requests(flooded)[:4] == [1, 1, 2, 1]
    for _ in range(3):
        flooded.core._process_input_queue()
    assert clients_with_requests(flooded).count(1) == 3 * REQUESTS_A_STEP


def test_calls_keep_their_place_behind_what_their_own_client_asked_for_before(flooded: Rig) -> None:
    for client in (1, 2):
        flooded.core.input_queue.put(UtilityRequest(client, 5, "stats", []))
    flooded.core._process_input_queue()
    ((client, batch),) = flooded.outputs()
    assert client == 2
    assert batch.utility_output.result.num_waiting_reqs < 3 * REQUESTS_A_STEP
    for _ in range(3):
        flooded.core._process_input_queue()
    ((client, batch),) = flooded.outputs()
    assert client == 1
    assert batch.utility_output.result.num_waiting_reqs == 3 * REQUESTS_A_STEP


def test_aborts_and_what_the_host_says_wait_for_no_flood(flooded: Rig) -> None:
    core = flooded.core
    flooded.add("one", client_index=2)
    last = f"many{3 * REQUESTS_A_STEP - 1}"
    core.input_queue.put(AbortRequests(1, ["many0", last]))
    core._process_input_queue()
    assert not {"many0", last} & core.scheduler.requests.keys()
    core.input_queue.put(DetachClient(1))
    core._process_input_queue()
    assert clients_with_requests(flooded) == [2]
    assert not core._lanes


def test_a_drain_finishes_what_was_asked_for_before_it(flooded: Rig) -> None:
    flooded.core.input_queue.put(ShutdownEngine(drain=True))
    flooded.core._process_input_queue()
    assert len(clients_with_requests(flooded)) == 3 * REQUESTS_A_STEP
    flooded.core.request_shutdown()


def reports_of(rig: Rig) -> list[SchedulerStats]:
    """Take the statistics that have been queued for the coordinator."""
    found = []
    while not rig.core.output_queue.empty():
        item = rig.core.output_queue.get()
        if isinstance(item, tuple) and item[0] == COORDINATOR_INDEX:
            found.append(item[1].scheduler_stats)
    return found


def test_a_busy_core_reports_at_intervals_and_when_its_requests_come_and_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(core_proc.time, "monotonic", lambda: now[0])
    core = rig.core
    rig.add("a", max_tokens=30)

    def tokens_told(elapsed: float) -> list[int]:
        now[0] += elapsed * core_proc.STATS_INTERVAL
        core._process_input_queue()
        core._process_engine_step()
        return [report.num_generation_tokens for report in reports_of(rig)]

    assert tokens_told(0.0) == [0, 1], "at rest; the first step"
    assert [tokens_told(0.3) for _ in range(6)] == [[], [], [], [5], [], []]
    rig.add("b", max_tokens=2)
    assert tokens_told(0.0) == [9], "another request"
    assert tokens_told(0.0) == [11], "its end"
    rig.add("c", max_tokens=1)
    assert tokens_told(0.0) == [], "a request that came and ended in a step changes no number"
    core._abort(AbortRequests(1, ["a"]))
    core.input_queue.put(ShutdownEngine(drain=True))
    assert core.scheduler.requests == {}
    core._publish_stats()
    assert [report.num_generation_tokens for report in reports_of(rig)] == [13], "there is nothing left to do"


def test_what_requests_take_is_told_when_it_has_changed_and_not_with_each_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(core_proc.time, "monotonic", lambda: now[0])
    core, interval = rig.core, core_proc.METER_INTERVAL
    monkeypatch.setattr(core, "stats_interval", interval / 5)
    rig.add("a", max_tokens=4)
    core._process_input_queue()
    told = []
    for elapsed, new in ((0.0, None), (0.5, "b"), (0.3, None), (0.4, None), (2.0, None)):
        now[0] += elapsed * interval
        if new is not None:
            rig.add(new, max_tokens=9)
            core._process_input_queue()
        core._process_engine_step()
        *_, report = reports_of(rig)
        told.append(None if report.requests is None else report.requests.time_to_first_token.count)
        assert report.num_generation_tokens == core.scheduler.meter.num_generation_tokens
    assert told == [1, None, None, 2, None], (
        "a first token; another, told an interval later with the end; nothing new"
    )
    while core.has_work():
        core._process_engine_step()
    *_, last = [report for report in reports_of(rig) if not report.num_running_reqs]
    assert last.requests is None
    assert core.stats().requests == core.scheduler.meter.stats


def test_the_report_that_says_that_a_core_is_idle_has_all_that_requests_have_taken(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_proc.time, "monotonic", lambda: 100.0)
    core = rig.core
    rig.add("a", max_tokens=3)
    core._process_input_queue()
    reports_of(rig)
    while core.scheduler.requests:
        core._process_engine_step()
    reports = reports_of(rig)
    assert [report.num_running_reqs for report in reports] == [1, 0]
    assert all(report.requests is not None for report in reports)
    assert reports[-1].requests.finished == [0, 1, 0, 0]


def test_a_core_that_rests_with_unfinished_requests_keeps_nothing_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_proc.time, "monotonic", lambda: 100.0)
    core = rig.core
    for name in ("a", "b"):
        rig.add(name, max_tokens=2 if name == "a" else 9)
    core._process_input_queue()
    core._process_engine_step()
    core._process_engine_step()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while core.has_work():
        core._process_engine_step()
    assert reports_of(rig)[-1].requests is None
    core.input_queue.put(ShutdownEngine(drain=True))
    core._process_input_queue()
    assert reports_of(rig)[0].requests.finished == [0, 1, 0, 0]


def test_a_report_is_not_changed_by_later_requests(rig: Rig) -> None:
    core = rig.core
    rig.add("a", max_tokens=1)
    core._process_input_queue()
    core._process_engine_step()
    *_, report = reports_of(rig)
    rig.add("b", max_tokens=1)
    core._process_input_queue()
    core._process_engine_step()
    assert report.requests.num_finished == 1
    assert core.scheduler.meter.stats.num_finished == 2


def test_a_request_is_timed_from_when_it_was_read(rig: Rig) -> None:
    request = EngineCoreRequest("r", [1], SamplingParams(max_tokens=1))
    before = rig.core.scheduler.clock()
    prepared, _ = rig.core.preprocess_add_request(request)
    assert before <= prepared.received_at <= rig.core.scheduler.clock()


def test_a_trace_has_nothing_of_what_requests_take(rig: Rig) -> None:
    core = rig.core
    core.input_queue.put(WantEvents("trace", True))
    rig.add("a", max_tokens=1)
    core._process_input_queue()
    core._process_engine_step()
    while core.has_work():
        core._process_engine_step()
    core._publish_stats(at_rest=True)
    messages = trace_of(rig)
    assert messages
    assert all(message.stats.requests is None for message in messages)
    assert core.stats().requests.num_finished == 1
