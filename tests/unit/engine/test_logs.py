"""An engine's log gets a bounded number of equal messages."""

from __future__ import annotations

import logging

from nbengine.runtime.logs import MAX_REPETITIONS, REPETITION_WINDOW, RepetitionLimit


def record(message: str, created: float) -> logging.LogRecord:
    made = logging.LogRecord("n", logging.WARNING, "p", 1, message, (), None)
    made.created = created
    return made


def test_a_message_is_repeated_a_bounded_number_of_times_in_a_while() -> None:
    limit = RepetitionLimit()
    records = [record("dropped %s", 1.0 + number / 1000) for number in range(MAX_REPETITIONS + 50)]
    passed = [item for item in records if limit.filter(item)]
    assert len(passed) == MAX_REPETITIONS
    assert "left out" in passed[-1].msg
    assert not any("left out" in item.msg for item in passed[:-1])
    assert limit.filter(record("another", 1.5))
    assert limit.filter(record("dropped %s", 1.0 + REPETITION_WINDOW))
