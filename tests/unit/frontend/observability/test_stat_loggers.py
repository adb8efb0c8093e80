"""Stat loggers get the statistics as they change; the one that writes lines writes them while there is work."""

from __future__ import annotations

import queue
import threading
from typing import Self

import pytest

from nbengine.config import EngineConfig, ModelConfig
from nbengine.frontend.observability import stat_loggers
from nbengine.frontend.observability.stat_loggers import LoggingStatLogger, StatsFollower
from nbengine.ipc.liveness import this_process
from nbengine.metrics.intervals import Interval
from nbengine.metrics.requests import RequestStats
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.runtime.connection import ConnectionInfo


def stats(time: float, tokens: int, running: int = 0, **fields) -> EngineStats:
    core = SchedulerStats(
        num_running_reqs=running,
        num_blocks=10,
        num_free_blocks=10 - running,
        num_generation_tokens=tokens,
        **fields,
    )
    return EngineStats([core], engines_running=running > 0, timestamp=time)


def lines(caplog: pytest.LogCaptureFixture, *states: EngineStats) -> list[str]:
    caplog.set_level("INFO", "nbengine")
    logger = LoggingStatLogger("e")
    for state in states:
        logger.record(state)
    return [record.getMessage() for record in caplog.records]


def test_a_line_comes_every_ten_seconds_while_there_is_work(caplog: pytest.LogCaptureFixture) -> None:
    working = [stats(100 + 0.5 * step, 50 * step, running=2) for step in range(50)]
    found = lines(caplog, stats(90, 0), *working)
    assert len(found) == 2
    assert found[0] == (
        "engine e: 2 running, 0 waiting, prompts 0.0 tokens/s, generation 100.0 tokens/s, KV cache 20.0% in use"
    )


def test_an_idle_engine_is_silent_and_its_idle_time_counts_for_no_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = lines(
        caplog,
        stats(100, 0),
        stats(500, 0),
        stats(1000, 0, running=1),
        stats(1005, 500, running=1),
        stats(1010, 1000, running=1),
    )
    assert len(found) == 1
    assert "generation 100.0 tokens/s" in found[0]


def test_a_short_piece_of_work_gets_a_line_and_many_share_one(caplog: pytest.LogCaptureFixture) -> None:
    states = [stats(0, 0)]
    for second in range(100, 112, 2):
        states += [stats(second, 100 * (second - 100), running=1), stats(second + 1, 100 * (second - 98))]
    found = lines(caplog, *states)
    assert len(found) == 2
    assert "generation 200.0 tokens/s" in found[0]


def test_work_that_had_no_line_gets_it_when_other_work_begins_later(caplog: pytest.LogCaptureFixture) -> None:
    states = [
        stats(100, 0),
        stats(101, 0, running=1),
        stats(103, 20),
        stats(104, 20, running=1),
        stats(106, 60),
    ]
    found = lines(caplog, *states, stats(900, 60, running=1))
    assert ["generation 10.0" in found[0], len(found)] == [True, 2]
    assert "generation 20.0" in found[1], "its own two seconds, not those until the other work"


def test_a_line_tells_what_else_there_is(caplog: pytest.LogCaptureFixture) -> None:
    requests = RequestStats(finished=[1, 2, 0, 0])
    requests.time_to_first_token.observe(0.25, times=4)
    later = stats(
        110,
        10,
        num_waiting_reqs=1234,
        num_prompt_tokens=50,
        prefix_cache_queries=100,
        prefix_cache_hits=75,
        num_preemptions=3,
        requests=requests,
    )
    (line,) = lines(caplog, stats(100, 0, running=1), later)
    for part in (
        "1,234 waiting",
        "prompts 5.0 tokens/s",
        "prefix cache 75.0% found",
        "3 requests ended",
        "3 preemptions",
    ):
        assert part in line
    assert "first token after 0.25 s in half of 4 requests" in line


def test_an_engine_core_that_was_started_again_counts_from_nothing() -> None:
    before, after = stats(0, 500).engines, stats(10, 20, requests=RequestStats(finished=[1, 0, 0, 0])).engines
    interval = Interval.between(before, after, 10)
    assert (interval.generation_tokens, interval.requests.num_finished) == (20, 1)
    new = SchedulerStats(engine_index=1, num_generation_tokens=5)
    assert Interval.between(before, [*stats(10, 507).engines, new], 10).generation_tokens == 12
    assert Interval.between([], [], 0).per_second(0) == 0
    assert Interval.between(before, before, 1).is_idle


class Source:
    """A source of messages that a test gives."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.closed = threading.Event()

    def poll(self, timeout: float | None = None) -> object:
        try:
            return self.messages.get(timeout=timeout)
        except queue.Empty:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()


class Notes:
    def __init__(self) -> None:
        self.told: queue.SimpleQueue[EngineStats] = queue.SimpleQueue()

    def record(self, stats: EngineStats) -> None:
        self.told.put(stats)


class Broken:
    calls = 0

    def record(self, stats: EngineStats) -> None:
        self.calls += 1
        raise ValueError("broken")


def info(host_started: int | None = None) -> ConnectionInfo:
    process = this_process()
    return ConnectionInfo(
        name="e",
        run_dir="",
        log_path="",
        host_pid=process.pid,
        host_started=process.started if host_started is None else host_started,
        config=EngineConfig(model=ModelConfig("random-tiny")),
    )


def test_every_stat_logger_gets_every_message_and_one_that_fails_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, notes, broken = Source(), Notes(), Broken()
    with StatsFollower(info(), [broken, notes], source) as follower:
        assert follower.newest == EngineStats()
        for step in (1, 2):
            source.messages.put(stats(step, step))
        assert [notes.told.get(timeout=60).timestamp for _ in range(2)] == [1, 2]
        assert follower.newest.timestamp == 2
        source.messages.put(None)
    assert not follower.is_running
    assert source.closed.is_set()
    assert broken.calls == 1
    assert "a stat logger of engine e has failed" in caplog.text


def test_it_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stat_loggers, "LOOK_INTERVAL", 0.01)
    source = Source()
    follower = StatsFollower(info(host_started=1), [], source)
    assert source.closed.wait(60)
    follower.close()
    assert not follower.is_running
