"""A client knows when it is ready, whatever the order of its news, and does not wait for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nbengine.client.link import ready_wait
from nbengine.client.link.ready_wait import News, ReadyWait
from nbengine.client.link.stalls import Stalls
from nbengine.client.routing.core_table import CoreTable
from nbengine.errors import EngineDeadError, EngineStalledError, EngineStartError
from nbengine.ipc.control_messages import EngineReady, Stalled

EPOCH = 1


def ready_message(rank: int) -> EngineReady:
    return EngineReady(rank, 16, 16, 64 - rank, 1, 1, "cpu", "float32", ["generate"], 100 + rank)


def connect(table: CoreTable, ranks: list[int]) -> None:
    """Let the host list ranks, and their cores connect."""
    table.begin_lease(EPOCH)
    table.set_ranks(ranks)
    for rank in ranks:
        table.on_ready(rank, 0)
        table.on_connected(rank, 0, EPOCH)
        table.on_heard(rank, 0)


def waiting(
    table: CoreTable, *, is_owner: bool, is_here: bool = False, stalls: Stalls | None = None
) -> ReadyWait:
    info: Any = SimpleNamespace(name="e", host_pid=17, is_here=is_here)
    return ReadyWait(info, table, stalls or Stalls(), is_owner=is_owner)


PATIENCE = (
    ("LOOK_INTERVAL", 0.005),
    ("ATTACH_PATIENCE", 0.02),
    ("HOST_PATIENCE", 0.02),
    ("BUSY_PATIENCE", 0.04),
    ("CONNECT_TIMEOUT", 0.02),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in PATIENCE:
        monkeypatch.setattr(ready_wait, name, seconds)
    monkeypatch.setattr(ready_wait, "stopped_process", lambda *_: None)


def test_a_rank_that_joins_while_a_client_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes requests as soon as it has connected, which the thread of the sockets may see before this client is told."""
    table = CoreTable()
    coming: deque[tuple[Callable[[], None], News]] = deque(
        [
            (lambda: table.set_ranks([0]), ready_message(0)),
            (lambda: connect(table, [0, 1]), None),
            (lambda: None, ready_message(1)),
        ]
    )

    def next_news(*_: object) -> News:
        happens, news = coming.popleft()
        happens()
        return news

    wait = waiting(table, is_owner=True)
    monkeypatch.setattr(wait, "_next", next_news)
    assert [core.rank for core in wait.wait(None)] == [0, 1]
    assert not coming


def one_missing() -> CoreTable:
    """Let two cores be ready, of which one has connected."""
    table = CoreTable()
    connect(table, [0])
    table.set_ranks([0, 1])
    table.on_ready(1, 0)
    return table


def test_a_core_that_has_not_greeted_on_its_outputs_is_waited_for() -> None:
    table = CoreTable()
    connect(table, [0, 1])
    table.on_ready(1, 1)
    table.on_connected(1, 1, EPOCH)
    assert table.all_usable
    wait = waiting(table, is_owner=True)
    for rank in (0, 1):
        wait.tell(ready_message(rank))
    # The greeting of the core's predecessor does not count.
    with pytest.raises(EngineStartError, match="did not connect within"):
        wait.wait(None)
    assert [table.on_heard(1, 1), table.on_heard(1, 0), table.on_heard(1, 1)] == [True, False, False]
    wait.tell(None)
    assert [core.rank for core in wait.wait(None)] == [0, 1]


def test_one_that_attaches_does_without_a_core_that_does_not_connect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wait = waiting(one_missing(), is_owner=False)
    for rank in (0, 1):
        wait.tell(ready_message(rank))
    assert [core.rank for core in wait.wait(None)] == [0, 1]
    assert "cores [1] are ready and have not connected yet" in caplog.text


def test_one_that_attaches_is_told_of_a_core_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_wait, "ATTACH_PATIENCE", 60.0)
    stalls = Stalls()
    stalls.note(Stalled(1, 42.0, "in step 7"))
    wait = waiting(one_missing(), is_owner=False, stalls=stalls)
    for rank in (0, 1):
        wait.tell(ready_message(rank))
    with pytest.raises(EngineStalledError, match="core 1: no progress for 42 s, in step 7"):
        wait.wait(None)


def test_one_that_has_started_the_engine_gives_up_a_core_that_does_not_connect() -> None:
    wait = waiting(one_missing(), is_owner=True)
    for rank in (0, 1):
        wait.tell(ready_message(rank))
    with pytest.raises(EngineStartError, match="did not connect within"):
        wait.wait(None)


def test_one_that_attaches_does_not_wait_for_a_silent_host_of_its_machine() -> None:
    wait = waiting(CoreTable(), is_owner=False, is_here=True)
    with pytest.raises(EngineStalledError, match=r"its host \(pid 17\) has not answered"):
        wait.wait(None)


@pytest.mark.parametrize(
    ("in_line", "waited"),
    [([3.0, 3.0, 3.0, 3.0], "0.02"), ([3.0, 3.001, 3.0011, 3.0012], "0.02"),
     ([3.0, 3.01, 3.02, 3.03], "0.04"), ([None], "0.04")],
    ids=["nobody keeps it from running", "hardly anybody does", "others have the processors", "nobody counts"],
)  # fmt: skip
def test_a_silent_host_that_could_run_is_waited_for_a_shorter_time(
    monkeypatch: pytest.MonkeyPatch, in_line: list[float | None], waited: str
) -> None:
    seconds = iter(in_line)
    monkeypatch.setattr(ready_wait, "seconds_in_line", lambda _pid: next(seconds, in_line[-1]))
    wait = waiting(CoreTable(), is_owner=False, is_here=True)
    with pytest.raises(EngineStalledError, match=f"has not answered for {waited} s"):
        wait.wait(None)


def test_one_that_got_no_time_itself_does_not_call_a_host_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    table = CoreTable()
    wait = waiting(table, is_owner=False, is_here=True)
    now, get = 0.0, wait._news.get

    def look(timeout: float) -> News:
        nonlocal now
        now += 60.0
        if now > 60.0:
            # The host's answer has lain there all the time.
            connect(table, [0])
            wait.tell(ready_message(0))
        return get(timeout=timeout)

    monkeypatch.setattr(wait, "_news", SimpleNamespace(get=look, put=wait._news.put))
    monkeypatch.setattr(ready_wait, "time", SimpleNamespace(monotonic=lambda: now))
    assert [core.rank for core in wait.wait(None)] == [0]


@pytest.mark.parametrize("why", ["is elsewhere", "has answered", "is its own"])
def test_a_host_that_is_elsewhere_or_has_answered_or_is_ones_own_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Of one elsewhere the connection tells; one that has answered may load a model for minutes."""
    wait = waiting(CoreTable(), is_owner=why == "is its own", is_here=why != "is elsewhere")
    wait.is_attached = why == "has answered"
    looks, get = 10, wait._news.get

    def look(timeout: float) -> News:
        nonlocal looks
        looks -= 1
        if not looks:
            wait.tell(EngineDeadError("it has ended"))
        return get(timeout=timeout)

    monkeypatch.setattr(wait, "_news", SimpleNamespace(get=look, put=wait._news.put))
    with pytest.raises(EngineDeadError, match="it has ended"):
        wait.wait(None)
