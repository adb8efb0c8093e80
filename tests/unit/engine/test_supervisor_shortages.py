"""A shortage in a turn of the host's loop ends no engine: what met it is done later, or given up by name."""

from __future__ import annotations

import errno
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from nbengine.config import EngineConfig, ModelConfig
from nbengine.engine.host import supervisor
from nbengine.engine.host.events import RemoveTensors, StartCore, StopAsked, TimePassed
from nbengine.engine.host.launchers import LocalLauncher
from nbengine.engine.host.state import HostPhase
from nbengine.engine.host.supervisor import Supervisor
from nbengine.errors import EngineStartError
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.processes import CoreHandle


class FakeCore:
    """A core that runs until it is signalled."""

    pid = 1
    rank = incarnation = 0

    def __init__(self) -> None:
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return 0 if self.signals else None

    def describe_end(self) -> str:
        return "exited"

    def log_tail(self) -> str:
        return ""

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self, timeout: float) -> None:
        return

    def close(self) -> None:
        return


class FakeLauncher:
    """Cannot fork for the first `failures` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.started: list[FakeCore] = []

    def start(self, rank: int, incarnation: int) -> CoreHandle:
        if self.failures:
            self.failures -= 1
            raise EngineStartError("engine core 0 cannot be started") from OSError(errno.EAGAIN, "no fork")
        self.started.append(FakeCore())
        return self.started[-1]

    def close(self) -> None:
        return


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    handlers = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(supervisor, "core_launcher", lambda info, wake, spare: FakeLauncher(0))
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(tmp_path))
    info = ConnectionInfo(
        name="short",
        run_dir=str(tmp_path / "run"),
        log_path=str(tmp_path / "log"),
        host_pid=0,
        host_started=0,
        config=EngineConfig(model=ModelConfig("fake"), bound=False),
        tensor_dir=str(tmp_path / "tensors"),
    )
    Path(info.run_dir).mkdir()
    host = Supervisor(info)
    for source in (host._clients, host._core_control):
        host._poller.register(source, zmq.POLLIN)
    yield host
    host.close(host._state._notice)  # type: ignore[arg-type]
    host._signals.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def turns_until(host: Supervisor, condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        host._poll_once()


def stop(host: Supervisor) -> None:
    host._feed(StopAsked("the test is over"))


def test_a_core_that_cannot_be_forked_now_is_started_later(host: Supervisor) -> None:
    host._launcher = launcher = FakeLauncher(3)
    host._feed(TimePassed())
    assert not launcher.started
    turns_until(host, lambda: launcher.started)
    assert host._cores == {0: launcher.started[0]}
    stop(host)
    assert launcher.started[0].signals == [signal.SIGTERM]
    host._reap()
    assert host._end is not None


def test_a_core_that_cannot_be_forked_for_long_is_given_up(
    host: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "START_PATIENCE", 0.05)
    host._launcher = FakeLauncher(1 << 30)
    host._feed(TimePassed())
    turns_until(host, lambda: host._end is not None)
    assert "engine core 0 cannot be started" in host._end.notice.cause


def test_an_end_does_not_wait_for_a_core_that_could_not_be_started_yet(host: Supervisor) -> None:
    host._launcher = launcher = FakeLauncher(1)
    host._feed(TimePassed())
    stop(host)
    assert host._end is not None
    assert host._state.phase is HostPhase.ENDED
    assert not launcher.started


def test_what_follows_an_action_that_met_a_shortage_is_done_at_once(
    host: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Any] = []

    def remove(directory: str, live: Any) -> None:
        if not removed:
            removed.append("too early")
            raise OSError(errno.EMFILE, "short")
        removed.append(live)

    monkeypatch.setattr(supervisor, "remove_abandoned", remove)
    host._launcher = launcher = FakeLauncher(0)
    host._perform_all([RemoveTensors(frozenset({7})), StartCore(0, 0)])
    assert launcher.started
    turns_until(host, lambda: removed == ["too early", {7}])
    stop(host)


def test_a_turn_that_meets_a_shortage_is_followed_by_another_and_a_bug_ends_the_host(
    host: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [
        RuntimeError("a bug"),
        zmq.ZMQError(errno.ENOMEM),
        OSError(errno.EMFILE, "short"),
    ]

    def fail() -> None:
        raise errors.pop()

    monkeypatch.setattr(host, "_poll_once", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        host.run()
    stop(host)


def test_a_launcher_without_a_descriptor_says_so(monkeypatch: pytest.MonkeyPatch, host: Supervisor) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("nbengine.engine.host.launchers.os.pipe", none_left)
    with pytest.raises(EngineStartError, match=r"engine core 3 cannot be started: .*Too many open files"):
        LocalLauncher(host.info).start(3, 0)
    stop(host)


def test_an_engine_whose_files_are_gone_is_not_scaled_and_goes_on(
    host: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host._lacks_room(1, 1) is None
    # What an import finds that meets a shortage, or a package that was removed.
    monkeypatch.setitem(sys.modules, "nbengine.engine.bounds", None)
    said = host._lacks_room(1, 2)
    assert said is not None
    assert said.startswith("whether there is room for 2 engine cores cannot be computed: import of ")
    stop(host)
