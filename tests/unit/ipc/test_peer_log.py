"""Lines that peers cause: how many of them there are, and how long."""

from __future__ import annotations

import logging

import pytest

from nbengine.ipc.peer_log import INTERVAL, LINES_OF_KIND, LINES_OF_PEER, LONGEST_PART, PeerLog, printable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> PeerLog:
    return PeerLog(logging.getLogger("test.peers"), clock)


def test_a_peer_that_sends_rubbish_for_hours_causes_a_few_lines_a_minute(
    log: PeerLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for minute in range(60):
        clock.now = 100.0 + minute * INTERVAL
        for _ in range(1000):
            log.warn_of(b"peer", "dropped %s", "x" * 1000)
    assert len(caplog.records) <= 60 * (LINES_OF_PEER + 1)
    assert sum(map(len, caplog.messages)) < 60 * (LINES_OF_PEER + 1) * (LONGEST_PART + 100)


def test_what_was_left_out_is_counted_later(
    log: PeerLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(LINES_OF_PEER + 7):
        log.warn_of("peer", "dropped %s", 1)
    clock.now += INTERVAL
    log.warn_of("other", "another")
    assert caplog.messages[-2:] == ["7 more lines were left out in 60 s, of: dropped %s", "another"]


def test_a_loud_peer_does_not_silence_the_others(log: PeerLog, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(1000):
        log.warn_of("loud", "dropped a message of %s", "loud")
    log.warn_of("quiet", "dropped a message of %s", "quiet")
    log.warn_of("loud", "something else of %s", "loud")
    assert caplog.messages[-2:] == ["dropped a message of quiet", "something else of loud"]


def test_peers_under_ever_new_names_cause_no_more_lines_and_are_not_remembered(
    log: PeerLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(10_000):
        log.warn_of(number, "dropped %s", number)
    assert len(caplog.records) == LINES_OF_KIND
    assert len(log._by_peer) == LINES_OF_KIND


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"\x00ab\xff", r"b'\x00ab\xff'"),
        ("one\nERROR two\r\x1b[31m", r"'one\nERROR two\r\x1b[31m'"),
        ("Grüße", "Grüße"),
        (ValueError("a\tb"), r"'a\tb'"),
        (7, 7),
    ],
)
def test_a_line_stays_one_line(value: object, text: object) -> None:
    assert printable(value) == text


@pytest.mark.parametrize("value", ["\x00" * 10**6, b"\x00" * 10**6, "x" * (LONGEST_PART + 1)])
def test_what_a_peer_sends_is_cut(value: object) -> None:
    text = printable(value)
    assert isinstance(text, str)
    assert len(text) <= LONGEST_PART
    assert text.endswith("…")
