"""The coordinator of cores in lock step: waves only grow, snapshots are of one turn, and nobody's garbage ends it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from nbengine.engine.host.coordinator import (
    GATHER_SECONDS,
    HIGH_LOAD,
    MESSAGES_A_TURN,
    NOBODY,
    PUBLISH_INTERVAL,
    DPCoordinator,
    DPCoordinatorProc,
    WaveStart,
)
from nbengine.errors import WireError
from nbengine.ipc.messages import FIRST_REQ, EngineCoreOutputs, EngineCoreRequestType
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.metrics.stats import EngineStats, SchedulerStats

STATS_TOPIC = b"\x01stats"


def begun(rank: int, wave: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(rank, start_wave=wave)


def over(wave: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(0, wave_complete=wave)


def report(rank: int, wave: int, turn: int, running: int = 1, incarnation: int = 0) -> EngineCoreOutputs:
    stats = SchedulerStats(rank, num_running_reqs=running, current_wave=wave, step_counter=turn)
    return EngineCoreOutputs(rank, scheduler_stats=stats, incarnation=incarnation)


def counts(stats: EngineStats) -> list[int]:
    return [engine.num_running_reqs for engine in stats.engines]


# Waves.


def test_a_wave_is_announced_once_to_all_but_the_one_that_began_it() -> None:
    state = DPCoordinator(3, lock_step=True)
    assert state.observe(begun(2, 0), 0.0) == WaveStart(0, exclude_rank=2)
    assert state.observe(begun(1, 0), 0.0) is None
    assert state.first_request(0, 0, 0.0) is None
    assert state.observe(over(0), 0.0) is None
    assert (state.current_wave, state.running) == (1, False)
    # Whatever the client believes, it is the next wave that begins, and for all.
    assert state.first_request(1, 0, 0.0) == WaveStart(1, NOBODY)


def test_both_ends_of_waves_in_one_merged_message() -> None:
    state = DPCoordinator(2, lock_step=True)
    assert state.observe(EngineCoreOutputs(0, wave_complete=4, start_wave=5), 0.0) == WaveStart(5, 0)
    assert state.observe(EngineCoreOutputs(0, wave_complete=6, start_wave=6), 0.0) is None
    assert (state.current_wave, state.running) == (7, False)


def test_who_subscribes_while_a_wave_runs_is_told() -> None:
    state = DPCoordinator(2, lock_step=True)
    assert state.joined() is None
    state.observe(begun(0, 0), 0.0)
    assert state.joined() == WaveStart(0, NOBODY)


def test_the_beginning_and_the_end_of_a_wave_are_due_at_once() -> None:
    state = DPCoordinator(2, lock_step=True)
    state.observe(report(0, 0, 1), 5.0)
    state.publish(5.0, 0.0)
    state.observe(begun(0, 0), 5.01)
    assert state.due == 5.01
    assert state.publish(5.01, 0.0).engines_running
    state.observe(over(0), 5.02)
    assert state.due == 5.02
    stats = state.publish(5.02, 0.0)
    assert (stats.current_wave, stats.engines_running) == (1, False)


@given(st.permutations([begun(0, 0), begun(1, 0), over(0), begun(1, 1), over(1), begun(0, 2), over(2)]))
def test_in_whatever_order_news_come_waves_only_grow(news: list[EngineCoreOutputs]) -> None:
    state = DPCoordinator(2, lock_step=True)
    seen, announced = [(0, False)], []
    for item in [*news, *news]:
        start = state.observe(item, 0.0)
        if start is not None:
            announced.append(start.wave)
        seen.append((state.current_wave, state.running))
    assert seen == sorted(seen)
    assert announced == sorted(set(announced))
    assert seen[-1] == (3, False)


def test_independent_engines_have_no_waves() -> None:
    state = DPCoordinator(2)
    assert state.observe(EngineCoreOutputs(1, wave_complete=3, start_wave=4), 0.0) is None
    assert state.first_request(0, 0, 0.0) is None
    assert (state.current_wave, state.running, state.due) == (0, False, None)


@pytest.mark.parametrize(("rank", "wave"), [(2, 0), (-1, 0), (0, -1)])
def test_what_a_client_cannot_mean_is_refused(rank: int, wave: int) -> None:
    with pytest.raises(WireError):
        DPCoordinator(2, lock_step=True).first_request(rank, wave, 0.0)


# Snapshots.


def test_a_snapshot_shows_no_turn_that_some_have_not_reported_and_the_rest_follows() -> None:
    state = DPCoordinator(3, lock_step=True)
    for rank in range(3):
        state.observe(report(rank, 0, 1, running=10), 0.0)
    state.observe(report(1, 0, 2, running=20), 0.0)
    assert counts(state.publish(0.0, 0.0)) == [10, 10, 10]
    assert state.due == PUBLISH_INTERVAL
    state.observe(report(0, 0, 2, running=20), 0.05)
    state.observe(report(2, 0, 2, running=20), 0.05)
    assert counts(state.publish(0.1, 0.0)) == [20, 20, 20]
    assert state.due is None


def test_independent_engines_are_shown_as_they_are_now() -> None:
    state = DPCoordinator(2)
    state.observe(report(0, 0, 9), 0.0)
    state.observe(report(1, 0, 1, running=5), 0.0)
    assert counts(state.publish(0.0, 0.0)) == [1, 5]


def test_a_rank_that_came_back_counts_from_the_start_and_its_predecessor_is_not_heard() -> None:
    state = DPCoordinator(2)
    state.observe(report(1, 0, 900, running=7), 0.0)
    state.forget(1, 1.0)
    assert counts(state.snapshot(0.0)) == [0, 0]
    state.observe(report(1, 0, 901, running=7), 0.0)
    assert counts(state.snapshot(0.0)) == [0, 0]
    state.observe(report(1, 0, 1, running=2, incarnation=1), 0.0)
    assert counts(state.snapshot(0.0)) == [0, 2]
    state.observe(report(1, 0, 0, running=3, incarnation=1), 0.0)
    assert counts(state.snapshot(0.0)) == [0, 2]


def test_ranks_come_and_go_at_the_end() -> None:
    state = DPCoordinator(2)
    state.observe(report(1, 0, 5, running=3), 0.0)
    state.scale(4)
    assert [engine.engine_index for engine in state.snapshot(0.0).engines] == [0, 1, 2, 3]
    assert counts(state.snapshot(0.0)) == [0, 3, 0, 0]
    state.observe(report(3, 0, 1, running=9), 0.0)
    state.scale(1)
    assert counts(state.snapshot(0.0)) == [0]
    with pytest.raises(WireError, match="engine 3, there are 1"):
        state.observe(report(3, 0, 2), 0.0)


# Sockets.


class Rig:
    """The coordinator's sockets, with a peer at each of them; `now` is the clock. Within a process what is sent is
    there at once."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        front, back, publish = (f"inproc://{name}" for name in ("front", "back", "publish"))
        self.coordinator = DPCoordinatorProc(self.context, 2, front, back, publish, lock_step=True)
        self.poller = zmq.Poller()
        self.coordinator.register(self.poller)
        self.engine = self.context.socket(zmq.PUSH)
        self.engine.connect(back)
        self.waves = self.context.socket(zmq.SUB)
        self.waves.connect(publish)
        self.client = self.context.socket(zmq.XSUB)
        self.client.connect(front)
        self.now = 0.0

    def push(self, outputs: EngineCoreOutputs) -> None:
        self.engine.send_multipart(MsgpackEncoder().encode(outputs))

    def report(self, number: int) -> None:
        """Push a report and wait until it is there."""
        self.push(report(0, 0, number))
        assert self.coordinator.output_back.poll(60_000)

    def newest(self) -> int:
        return self.coordinator.state._engines[0].step_counter

    def turn(self, timeout_ms: int = 5000) -> bool:
        """One turn of the host's loop; tells whether any socket was ready."""
        ready = {socket for socket, _ in self.poller.poll(timeout_ms)}
        self.coordinator.process(ready, self.now)
        return bool(ready)

    def subscribe_to_waves(self) -> None:
        self.waves.subscribe(EngineCoreRequestType.START_DP_WAVE.value)
        assert self.turn()

    def start_heard(self) -> WaveStart:
        assert self.waves.poll(60_000)
        kind, frame = self.waves.recv_multipart()
        assert kind == EngineCoreRequestType.START_DP_WAVE.value
        return msgspec.msgpack.decode(frame, type=WaveStart)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_a_wave_goes_from_one_engine_to_the_others(rig: Rig) -> None:
    rig.subscribe_to_waves()
    rig.push(begun(1, 0))
    assert rig.turn()
    assert rig.start_heard() == WaveStart(0, 1)


def test_an_engine_that_subscribes_late_hears_of_the_wave(rig: Rig) -> None:
    rig.push(begun(1, 0))
    assert rig.turn()
    rig.subscribe_to_waves()
    assert rig.start_heard() == WaveStart(0, NOBODY)


def test_a_client_begins_a_wave_and_late_clients_get_the_state(rig: Rig) -> None:
    rig.subscribe_to_waves()
    rig.client.send_multipart([FIRST_REQ, msgspec.msgpack.encode((1, 0))])
    assert rig.turn()
    assert rig.start_heard() == WaveStart(0, NOBODY)
    rig.client.send(STATS_TOPIC)
    assert rig.turn()
    assert rig.client.poll(60_000)
    topic, *frames = rig.client.recv_multipart()
    stats = MsgpackDecoder(EngineStats).decode(frames)
    assert (topic, stats.current_wave, stats.engines_running) == (b"stats", 0, True)


def test_what_is_no_message_is_dropped_on_every_socket(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.subscribe_to_waves()
    for frames in (
        [FIRST_REQ],
        [FIRST_REQ, b"\xc1"],
        [FIRST_REQ, b"\x92\xa0\x00"],
        [FIRST_REQ, b"\x92\x07\x00"],
        [b"?"],
    ):
        rig.client.send_multipart(frames)
    rig.engine.send(b"\xc1")
    rig.push(begun(9, 0))
    while caplog.text.count("dropped a message to the coordinator") < 7:
        assert rig.turn()
    rig.push(begun(0, 0))
    assert rig.turn()
    assert rig.start_heard() == WaveStart(0, 0)


def test_under_load_reports_gather_and_afterwards_the_first_is_heard_at_once(rig: Rig) -> None:
    num_woken, step = 0, 0.1 / HIGH_LOAD
    for number in range(255):
        rig.now += step
        rig.report(number)
        num_woken += rig.turn(0)
    # Until it is known how many they are, each wakes the host; then the time does.
    assert num_woken < 255 * 0.5
    assert rig.newest() < 254
    rig.now += GATHER_SECONDS
    rig.turn(0)
    assert rig.newest() == 254
    rig.now += 10.0
    rig.turn(0)
    rig.report(1000)
    assert rig.turn(0)
    assert rig.newest() == 1000


def test_a_flood_of_reports_does_not_keep_the_host_from_its_other_work(rig: Rig) -> None:
    for number in range(MESSAGES_A_TURN + 1):
        rig.report(number)
    assert rig.turn()
    assert rig.newest() == MESSAGES_A_TURN - 1
    rig.now += GATHER_SECONDS
    rig.turn(0)
    assert rig.newest() == MESSAGES_A_TURN


def test_a_client_is_answered_with_what_has_gathered(rig: Rig) -> None:
    rig.subscribe_to_waves()
    rig.push(begun(0, 0))
    assert rig.turn()
    assert rig.start_heard().wave == 0
    for number in range(255):
        rig.now += 0.1 / HIGH_LOAD
        rig.report(number)
        rig.turn(0)
    assert rig.newest() < 254
    # The wave has ended, which the coordinator has not read yet when the client, who knows, asks for the next one.
    rig.push(over(0))
    assert rig.coordinator.output_back.poll(60_000)
    rig.client.send_multipart([FIRST_REQ, msgspec.msgpack.encode((1, 1))])
    assert rig.turn()
    assert rig.start_heard() == WaveStart(1, NOBODY)
