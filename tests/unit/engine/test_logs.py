"""What goes into an engine's log."""

from __future__ import annotations

import logging

from nbengine.engine.logs import MAX_REPETITIONS, REPETITION_WINDOW, RepetitionLimit


def record(message: str, created: float) -> logging.LogRecord:
    made = logging.LogRecord("n", logging.WARNING, "p", 1, message, (), None)
    made.created = created
    return made


def test_a_message_is_repeated_so_often_in_a_while_and_no_more() -> None:
    limit = RepetitionLimit()
    records = [record("dropped %s", 1.0 + number / 1000) for number in range(MAX_REPETITIONS + 50)]
    passed = [item for item in records if limit.filter(item)]
    assert len(passed) == MAX_REPETITIONS
    assert "left out" in passed[-1].msg
    assert not any("left out" in item.msg for item in passed[:-1])
    assert limit.filter(record("another", 1.5))
    assert limit.filter(record("dropped %s", 1.0 + REPETITION_WINDOW))
