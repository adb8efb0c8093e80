"""A request's speed is that of the tokens which came over a while."""

from __future__ import annotations

import pytest

from nbengine.outputs import RequestMetrics


@pytest.mark.parametrize(
    ("last", "tokens", "latency", "speed"),
    [
        (12.0, 5, 0.5, 2.0),
        (10.021, 8, 0.003, 1000 / 3),
        # Two messages that were read one after the other: no engine is as fast as that.
        (10.0001, 2, 0.0001, None),
        (10.0, 2, 0.0, None),
        (10.0, 1, None, None),
    ],
)
def test_a_speed_is_made_of_tokens_that_came_over_a_while(
    last: float, tokens: int, latency: float | None, speed: float | None
) -> None:
    metrics = RequestMetrics(first_token_time=10.0, last_token_time=last, num_generation_tokens=tokens)
    assert metrics.inter_token_latency == (None if latency is None else pytest.approx(latency))
    assert metrics.tokens_per_second == (None if speed is None else pytest.approx(speed))


def test_before_the_first_token_there_is_none() -> None:
    assert RequestMetrics().tokens_per_second is None
