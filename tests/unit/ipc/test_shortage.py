"""Shortages are told from failures, sat out with growing pauses, and reported once; a few descriptors are kept back."""

from __future__ import annotations

import errno
import logging
import os

import pytest
import zmq
from descriptors import exhausted

from nbengine.errors import NBEngineError
from nbengine.ipc import shortage
from nbengine.ipc.shortage import DescriptorReserve, Setbacks, check_room, is_shortage, persist
from nbengine.ipc.sockets import make_socket

logger = logging.getLogger(__name__)


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.naps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shortage, "time", clock)
    return clock


def caused(by: BaseException) -> NBEngineError:
    error = NBEngineError("cannot connect")
    error.__cause__ = by
    return error


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN])
def test_a_shortage_is_known_by_its_number_wherever_it_came_from(number: int) -> None:
    for error in (OSError(number, "short"), zmq.ZMQError(number)):
        assert is_shortage(error)
        assert is_shortage(caused(caused(error)))


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), OSError(errno.ENOENT, "gone"), NBEngineError("no"), caused(ValueError())]
)
def test_what_is_no_shortage_is_raised_again(error: Exception) -> None:
    assert not is_shortage(error)
    with pytest.raises(type(error)) as caught:
        Setbacks(logger, "it falters").note(error)
    assert caught.value is error


def test_pauses_grow_to_a_bound_and_are_short_again_after_a_calm(clock: Clock) -> None:
    setbacks = Setbacks(logger, "it falters")
    pauses = []
    for _ in range(10):
        pauses.append(setbacks.note(OSError(errno.EMFILE, "short")))
        clock.sleep(pauses[-1])
    assert pauses[0] == shortage.FIRST_PAUSE
    assert pauses == sorted(pauses)
    assert pauses[-1] == shortage.LONGEST_PAUSE
    clock.sleep(2 * shortage.CALM)
    assert setbacks.note(OSError(errno.EMFILE, "short")) == shortage.FIRST_PAUSE


def test_setbacks_are_logged_once_in_a_while(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    setbacks = Setbacks(logger, "it falters")
    for _ in range(3):
        for _ in range(100):
            setbacks.note(OSError(errno.EMFILE, "short"))
        clock.sleep(shortage.REPORT_INTERVAL)
    assert len(caplog.records) == 3
    assert "it falters: [Errno 24] short" in caplog.text


def test_persisting_ends_with_success_or_with_the_time(clock: Clock) -> None:
    attempts = []

    def third_time_lucky() -> None:
        attempts.append(clock.now)
        if len(attempts) < 3:
            raise OSError(errno.EMFILE, "short")

    assert persist(third_time_lucky, Setbacks(logger, "it falters"), 5.0)
    assert len(attempts) == 3

    def never() -> None:
        raise OSError(errno.EMFILE, "short")

    assert not persist(never, Setbacks(logger, "it falters"), 5.0)
    assert clock.now >= attempts[0] + 5.0


def test_a_reserve_is_there_when_there_is_nothing_else() -> None:
    reserve = DescriptorReserve()
    with exhausted():
        with pytest.raises(OSError, match="Too many open files"):
            os.listdir("/proc")
        reserve.give_back()
        assert os.listdir("/proc")
        reserve.renew()
        with pytest.raises(OSError, match="Too many open files"):
            check_room(1)
    reserve.give_back()
    reserve.give_back()


def test_a_socket_that_there_is_no_room_for_is_refused_and_takes_nothing() -> None:
    """libzmq would abort the process if it got some of the descriptors that a context's threads need."""
    reserves = [DescriptorReserve(count) for count in range(1, shortage.ROOM)]
    with zmq.Context() as context, exhausted():
        for reserve in reserves:
            reserve.give_back()
            with pytest.raises(
                NBEngineError, match=r"cannot connect .* Too many open files .*ulimit -n"
            ) as caught:
                make_socket(context, "ipc:///nowhere", zmq.DEALER, bind=False)
            assert is_shortage(caught.value)
            reserve.renew()
