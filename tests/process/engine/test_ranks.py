"""Independent ranks in real processes: they die, come back, join and leave, and the others stream on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from engine_processes import is_running
from process_support.engine_under_test import FAKE_EXECUTOR, wait_for
from process_support.fake_worker import FAKE_WORKERS_EXECUTOR
from process_support.ranks_client import Traffic, core_pids, join, new_core
from stopping import stop

from nbengine.client.engines.directory import list_engines, reap
from nbengine.client.engines.logs import find_worker_log
from nbengine.config import ParallelConfig, SchedulerConfig
from nbengine.engine.host.rank_table import MAX_DEATHS
from nbengine.ipc.control_messages import EngineLost, RanksChanged, Scaled, ScaleElasticEP, Shutdown
from nbengine.ipc.messages import EngineCoreRequestType, UtilityRequest

KILLED = "was killed by signal 9"
SLOW = {"step_seconds": 0.01}


@pytest.fixture
def start_ranks(start_engine):
    """Start an engine of some ranks."""

    def start(
        num_ranks: int, knobs: dict | None = None, *, executor: str = FAKE_EXECUTOR, tp: int = 1, **engine
    ):
        parallel = ParallelConfig(
            data_parallel_size=num_ranks, tensor_parallel_size=tp, distributed_executor_backend=executor
        )
        return start_engine(knobs, parallel=parallel, **engine)

    return start


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# A rank that dies.


def test_an_idle_rank_that_is_killed_comes_back(start_ranks) -> None:
    engine = start_ranks(3)
    client = join(engine, 3)
    client.news.clear()
    pid = client.pid(1)
    kill(pid)
    client.run_until(lambda: len(client.heard(RanksChanged)) == 2, "the return of the rank")
    out, lost, ready, back = client.changes()
    assert out == RanksChanged([0, 2])
    assert (lost.rank, lost.incarnation, lost.restarting) == (1, 0, True)
    assert f"engine core 1 (pid {pid}) {KILLED}" in lost.cause
    assert (ready.rank, ready.incarnation) == (1, 1)
    assert back == RanksChanged([0, 1, 2])
    client.wait_ranks(0, 1, 2)
    assert [core.pid for core in engine.read_connection().ready] == [client.pid(rank) for rank in range(3)]
    answer = client.ask("r", rank=1)
    client.wait_done(answer)
    assert answer.is_complete


def test_only_what_a_killed_rank_had_begun_is_lost(start_ranks) -> None:
    engine = start_ranks(3, SLOW, scheduler=SchedulerConfig(max_num_seqs=1))
    client, other = join(engine, 3), join(engine, 3)
    # The one that is killed has much to do: it must not have ended when the last one begins.
    lengths = [200, 500, 200]
    streams = [client.ask(f"s{rank}", 100 * rank, lengths[rank], rank) for rank in range(3)]
    waiting = [client.ask(f"w{n}", n) for n in range(6)]
    foreign = other.ask("o", 5, 60, rank=2)
    client.run_until(lambda: all(stream.tokens for stream in streams), "the first tokens")
    kill(client.pid(1))
    client.wait_done(*streams, *waiting)
    assert KILLED in streams[1].lost
    assert all(asked.is_complete for asked in (streams[0], streams[2], *waiting))
    other.wait_done(foreign)
    assert foreign.is_complete
    assert [type(news) for news in other.changes()[3:5]] == [RanksChanged, EngineLost]


def test_a_rank_that_is_killed_while_it_starts_again_is_started_once_more(start_ranks) -> None:
    engine = start_ranks(2, {"load_seconds": 0.5})
    client = join(engine, 2)
    known = core_pids(engine)
    kill(client.pid(0))
    client.wait_lost()
    kill(new_core(engine, known).pid)
    assert client.wait_lost().incarnation == 1
    client.wait_ranks(0, 1)
    assert client.ready_of[0].incarnation == 2


def test_a_rank_that_always_dies_is_given_up_until_somebody_wants_it_again(start_ranks) -> None:
    engine = start_ranks(2)
    client = join(engine, 2)
    for _ in range(MAX_DEATHS):
        kill(client.pid(1))
        assert client.wait_lost().restarting
        client.wait_ranks(0, 1)
    kill(client.pid(1))
    assert not client.wait_lost().restarting
    answer = client.ask("r")
    client.wait_done(answer)
    assert answer.is_complete
    late = join(engine, 1)
    assert late.ranks == {0}
    assert client.scale(2).error is None
    late.wait_ranks(0, 1)
    assert late.ready_of[1].incarnation == MAX_DEATHS + 1


def test_the_last_rank_takes_the_engine_with_it(start_ranks, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    engine = start_ranks(2, {"hold_load": str(hold)})
    client = join(engine, 2)
    # The other one does not come back.
    hold.touch()
    kill(client.pid(0))
    client.wait_lost()
    kill(client.pid(1))
    assert f"engine core 1 (pid {client.pid(1)}) {KILLED}" in client.wait_dead().cause
    engine.wait_gone()


def test_a_rank_that_fails_says_why_and_comes_back(start_ranks) -> None:
    engine = start_ranks(2, {"fail_at_token": 13})
    client = join(engine, 2)
    broken, other = client.ask("b", 10, 50, rank=0), client.ask("o", 20, 50, rank=1)
    lost = client.wait_lost()
    assert "failed: RuntimeError: the model broke at token 13" in lost.cause
    assert lost.log_tail.splitlines()[-1] == "RuntimeError: the model broke at token 13"
    client.wait_done(broken, other)
    assert broken.lost == lost.cause
    assert other.is_complete
    client.wait_ranks(0, 1)


def test_the_workers_of_a_killed_rank_are_gone_before_it_is_back(start_ranks) -> None:
    """Even those that do not notice the end of their core."""
    # Told so, they need not look for a device, which takes the import of torch.
    scheduler = SchedulerConfig(async_scheduling=False)
    engine = start_ranks(2, executor=FAKE_WORKERS_EXECUTOR, tp=2, scheduler=scheduler)
    client = join(engine, 2)
    logs = [find_worker_log(engine.log_path, rank) for rank in range(4)]
    assert len(set(logs)) == 4
    written = [log.read_text() for log in logs]
    workers = [psutil.Process(worker.pid) for worker in client.ready_of[1].workers]
    others = [psutil.Process(worker.pid) for worker in client.ready_of[0].workers]
    stop(*(worker.pid for worker in workers))
    kill(client.pid(1))
    client.wait_lost()
    client.run_until(lambda: client.ready_of[1].incarnation == 1, "the next incarnation")
    assert not any(map(is_running, workers))
    assert all(map(is_running, others))
    added = [log.read_text()[len(before) :] for log, before in zip(logs, written, strict=True)]
    assert [bool(text) for text in added] == [False, False, True, True]


def test_several_ranks_are_one_engine_to_list_and_reap(start_ranks) -> None:
    engine = start_ranks(2)
    client = join(engine, 2)
    kill(client.pid(1))
    client.wait_lost()
    client.wait_ranks(0, 1)
    (listing,) = [listing for listing in list_engines() if listing.info.name == engine.name]
    assert listing.state == "ready"
    assert set(listing.pids) == {engine.host.pid, client.pid(0), client.pid(1)}
    cores = [psutil.Process(client.pid(rank)) for rank in (0, 1)]
    stop(*(core.pid for core in cores))
    engine.host.kill()
    engine.host.wait()
    reap()
    wait_for(lambda: not any(map(is_running, cores)), "the end of the cores")
    assert engine.name not in [listing.info.name for listing in list_engines()]


# Scaling.


def test_no_request_is_lost_or_doubled_while_ranks_come_and_go(start_ranks) -> None:
    engine = start_ranks(1, {"step_seconds": 0.005}, scheduler=SchedulerConfig(max_num_seqs=3))
    traffic = Traffic(join(engine, 1), join(engine, 1))
    for size in (3, 2, 1):
        assert traffic.scale(size) == Scaled(size)
        traffic.wait_for_ranks(size)
        assert len(core_pids(engine)) == size
        info = engine.read_connection()
        assert (len(info.ready), info.config.parallel.data_parallel_size) == (size, size)
    traffic.finish()
    assert all(asked.is_complete for asked in traffic.asked)
    assert sum(asked.num_returned for asked in traffic.asked) > 0
    assert max(asked.num_returned for asked in traffic.asked) <= 2


def test_a_leaving_rank_finishes_what_runs_and_hands_back_what_does_not(start_ranks, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    engine = start_ranks(2, {"hold": str(hold)} | SLOW, scheduler=SchedulerConfig(max_num_seqs=1))
    client = join(engine, 2)
    runs = client.ask("runs", 1, 50, rank=1)
    wait_for(lambda: "a step is held" in engine.log(), "the step")
    waits = client.ask("waits", 2, 5, rank=1)
    client.tell(ScaleElasticEP(1))
    client.run_until(lambda: client.ranks == {0}, "the news")
    # Sent by one who does not know yet.
    client.ranks = {0, 1}
    late = client.ask("late", 3, 5, rank=1)
    client.ranks = {0}
    waits.rank = late.rank = None
    assert late.home == (1, 0)
    hold.unlink()
    client.wait_done(runs, waits, late)
    assert all(asked.is_complete for asked in (runs, waits, late))
    assert (waits.num_returned, late.num_returned) == (1, 1)
    client.run_until(lambda: client.heard(Scaled), "the end of the scaling")
    assert client.heard(Scaled) == [Scaled(1)]
    client.run_until(lambda: (1, 0) in client.gone, "the end of the core")
    assert client.heard(EngineLost) == []


def test_a_core_that_does_not_come_up_is_named_and_the_others_go_on(start_ranks, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    engine = start_ranks(1, {"hold_load": str(hold)})
    client = join(engine, 1)
    known = core_pids(engine)
    hold.touch()
    client.tell(ScaleElasticEP(2))
    core = new_core(engine, known)
    kill(core.pid)
    client.run_until(lambda: client.heard(Scaled), "the answer")
    hold.unlink()
    (scaled,) = client.heard(Scaled)
    assert scaled.data_parallel_size == 1
    assert f"engine core 1 (pid {core.pid}) {KILLED}" in scaled.error
    assert client.heard(RanksChanged) == []
    assert client.scale(2) == Scaled(2)
    client.wait_ranks(0, 1)


def test_a_core_that_is_killed_while_it_leaves_loses_only_what_it_had_begun(start_ranks) -> None:
    engine = start_ranks(2, SLOW, scheduler=SchedulerConfig(max_num_seqs=1))
    client = join(engine, 2)
    runs, waits = client.ask("runs", 1, 400, rank=1), client.ask("waits", 2, 5, rank=1)
    client.run_until(lambda: runs.tokens, "its first token")
    waits.rank = None
    client.tell(ScaleElasticEP(1))
    client.run_until(lambda: waits.num_returned, "the request that waited")
    kill(client.pid(1))
    client.wait_done(runs, waits)
    assert KILLED in runs.lost
    assert waits.is_complete
    client.run_until(lambda: client.heard(Scaled), "the end of the scaling")
    assert client.heard(Scaled) == [Scaled(1)]
    assert [lost.restarting for lost in client.heard(EngineLost)] == [False]


@pytest.mark.parametrize("size", [1, 3])
def test_an_engine_can_be_shut_down_in_the_middle_of_a_scaling(start_ranks, size) -> None:
    engine = start_ranks(2, {"load_seconds": 1.0} | SLOW)
    client = join(engine, 2)
    stream = client.ask("r", 1, 400, rank=1)
    client.run_until(lambda: stream.tokens, "its first token")
    known = core_pids(engine)
    client.tell(ScaleElasticEP(size))
    if size == 3:
        new_core(engine, known)
    else:
        client.run_until(lambda: client.ranks == {0}, "the news")
    client.tell(Shutdown())
    assert client.wait_dead().expected
    engine.wait_gone()


def test_a_paused_rank_that_leaves_goes_on_with_what_it_has_begun(start_ranks) -> None:
    engine = start_ranks(2, SLOW)
    client = join(engine, 2)
    stream = client.ask("r", 1, 100, rank=1)
    client.run_until(lambda: stream.tokens, "its first token")
    call = UtilityRequest(0, 1, "pause_generation", ["keep"])
    client.input.send_multipart(
        [client.identity(1), EngineCoreRequestType.UTILITY.value, *client.encoder.encode(call)]
    )
    client.run_until(lambda: 1 in client.utility, "the pause")
    assert client.scale(1) == Scaled(1)
    client.wait_done(stream)
    assert stream.is_complete
