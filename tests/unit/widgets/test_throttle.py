"""Both limits hold on average, whatever is sent."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.widgets.dashboard.throttle import Throttle
from tests.support.thorough import amount

INTERVAL, RATE, SLACK = 0.2, 1000.0, 0.05


@settings(max_examples=amount(20, thorough=2000), deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 0.5), st.integers(0, 2000)), min_size=1, max_size=80))
def test_neither_messages_nor_bytes_exceed_their_rate(history: list[tuple[float, int]]) -> None:
    now = 50.0
    throttle = Throttle(INTERVAL, RATE, SLACK, lambda: now)
    sent: list[tuple[float, int]] = []
    for pause, size in history:
        now += pause
        if throttle.is_due:
            sent.append((now, size))
            throttle.sent(size)
    for first, (began, _) in enumerate(sent):
        for last, (ended, _) in enumerate(sent[first + 1 :], first + 1):
            took = ended - began + SLACK + 1e-6
            assert (last - first) * INTERVAL <= took
            assert sum(size for _, size in sent[first:last]) <= RATE * took


def test_who_looks_once_an_interval_is_not_held_up() -> None:
    now = 50.0
    throttle = Throttle(INTERVAL, RATE, SLACK, lambda: now)
    count = 0
    for tick in range(100):
        # A little early each other time.
        now = 50.0 + tick * INTERVAL - (0.004 if tick % 2 else 0.0)
        if throttle.is_due:
            throttle.sent(10)
            count += 1
    assert count >= 98


def test_what_was_free_meanwhile_may_be_used_at_once() -> None:
    now = 50.0
    throttle = Throttle(0.0, RATE, INTERVAL, lambda: now)
    counts = []
    for tick in range(5):
        now = 50.0 + (tick + 1) * INTERVAL
        counts.append(0)
        while throttle.is_due:
            throttle.sent(40)
            counts[-1] += 1
    # 200 bytes an interval, and what is begun is sent.
    assert counts == [6, 5, 5, 5, 5]
