"""Quantities, tables and answers as they are shown."""

from __future__ import annotations

import pytest

from nbengine.magics.render import answer_bundle, count, footer_of, seconds, table
from nbengine.magics.result import GenerationResult
from nbengine.outputs import RequestMetrics
from nbengine.units import size


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0.0841, "84 ms"),
        (1.26, "1.3 s"),
        (125, "2 min 5 s"),
        (600, "10 min"),
        (3840, "1 h 4 min"),
        (7200, "2 h"),
    ],
)
def test_seconds(duration: float, text: str) -> None:
    assert seconds(duration) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (512, "512 B"),
        (2048, "2 KiB"),
        (98.4 * 2**20, "98.4 MiB"),
        (600 * 2**20, "600 MiB"),
        (5 << 28, "1.25 GiB"),
    ],
)
def test_sizes(number: float, text: str) -> None:
    assert size(number) == text


def test_counts() -> None:
    assert [count(1, "token"), count(2000, "token"), count(2, "process", "processes")] == [
        "1 token",
        "2,000 tokens",
        "2 processes",
    ]


def test_tables_align_in_text_and_escape_in_html() -> None:
    plain, html = table([["a", "<b>"], ["long", "c"]], ["X", "Y"])
    assert plain == "X     Y\na     <b>\nlong  c"
    assert "<th>X</th>" in html
    assert "&lt;b&gt;" in html


def finished(**changes: object) -> GenerationResult:
    result = GenerationResult("r", "p")
    result.token_ids = [1, 2, 3]
    result.finish_reason = "stop"
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def test_the_footer_says_speed_reuse_and_why_it_ended_early() -> None:
    metrics = RequestMetrics(10.0, None, 10.2, 11.2, None, 2, 3)
    full = footer_of(
        finished(metrics=metrics, num_cached_tokens=16, num_prompt_tokens=20, finish_reason="length")
    )
    assert full == (
        "stopped at the limit · 3 tokens · 2.0 tok/s · first token after 200 ms · "
        "16 of 20 prompt tokens reused · preempted 2 times"
    )
    assert footer_of(finished()) == "3 tokens"
    assert footer_of(finished(finish_reason="abort")) == "ended early · 3 tokens"
    assert footer_of(finished(token_ids=[])) == ""


def test_json_that_cannot_be_read_is_shown_as_it_is_with_the_reason() -> None:
    bundle = answer_bundle('{"a": ', "json", "2 tokens")
    assert bundle["text/plain"].startswith('{"a": \n\n[2 tokens · not valid JSON: Expecting value')
    assert "not valid" not in answer_bundle('{"a": ', "json", complete=False)["text/html"]
    assert answer_bundle('```json\n{"a":1}\n```', "json")["text/plain"] == '{\n  "a": 1\n}'
