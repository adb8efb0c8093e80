"""Recording from a socket, as the coordinator publishes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import pytest
import zmq

from nbengine.config import EngineArgs
from nbengine.ipc.liveness import this_process
from nbengine.ipc.messages import STATS_TOPIC
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.waves import recording as recording_module
from nbengine.widgets.waves.recording import WaveRecording

DEADLINE = 60.0


class Publisher:
    """The coordinator's end."""

    def __init__(self, info: ConnectionInfo) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = make_socket(self._context, info.address("stats.sock"), zmq.XPUB, bind=True)

    def send(self, steps: int, moment: float) -> None:
        stats = EngineStats([SchedulerStats(0, step_counter=steps)], timestamp=moment)
        self._socket.send_multipart([STATS_TOPIC, msgspec.msgpack.encode(stats)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConnectionInfo:
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(tmp_path))
    return ConnectionInfo(
        name="dense",
        run_dir=str(tmp_path),
        log_path="",
        host_pid=os.getpid(),
        host_started=this_process().started,
        config=EngineArgs(model="random-tiny").create_engine_config(bound=False),
    )


@pytest.fixture
def publisher(info: ConnectionInfo) -> Iterator[Publisher]:
    publisher = Publisher(info)
    yield publisher
    publisher.close()


def test_what_is_published_meanwhile_is_recorded(info: ConnectionInfo, publisher: Publisher) -> None:
    began = time.time()
    entered = threading.Event()

    def publish() -> None:
        step = 0
        while not entered.is_set():
            step += 1
            publisher.send(step, began + step * 0.001)
            time.sleep(0.01)

    thread = threading.Thread(target=publish)
    thread.start()
    with WaveRecording(info) as recording:
        entered.set()
        thread.join()
        publisher.send(100_000, began + 100)
        publisher.send(100_007, began + 101)
        end = time.monotonic() + DEADLINE
        while not recording.timeline.spans or recording.timeline.spans[-1].ranks[0].steps != 7:
            assert time.monotonic() < end
            time.sleep(0.005)
    assert recording.timeline.spans[-1].seconds == pytest.approx(1.0)
    assert recording.timeline.engine == "dense"


def test_what_lies_unread_at_the_end_is_recorded(
    info: ConnectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.time()

    class Unread:
        """A subscriber that gets no time between the first message and the end of the recording."""

        def __init__(self, info: ConnectionInfo) -> None:
            self.messages = [
                EngineStats([SchedulerStats(0, step_counter=steps)], timestamp=began + moment)
                for steps, moment in ((1, 0.0), (100_000, 100.0), (100_007, 101.0))
            ]
            self.is_first = True

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def poll(self, timeout: float) -> EngineStats | None:
            if not self.is_first:
                assert recording._closing.wait(DEADLINE)
            self.is_first = False
            return self.messages.pop(0) if self.messages else None

    monkeypatch.setattr(recording_module, "StatsSubscriber", Unread)
    recording = WaveRecording(info)
    with recording:
        pass
    assert recording.timeline.spans[-1].ranks[0].steps == 7


def test_an_engine_that_has_gone_is_not_waited_for(info: ConnectionInfo) -> None:
    info.host_started -= 1
    with WaveRecording(info) as recording:
        pass
    assert recording.timeline.spans == ()
