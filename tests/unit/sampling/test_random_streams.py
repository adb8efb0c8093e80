"""Random numbers as a function of stream and position."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kstest

from nbengine.sampling.random_streams import UnseededStreams, seeded_stream, uniforms

COUNT = 20_000


def test_numbers_depend_on_stream_and_position_alone() -> None:
    streams = np.array([seeded_stream(seed) for seed in (0, 1, 2**63 - 1)], np.uint64)
    positions = np.array([0, 5, 2**31])
    together = uniforms(streams, positions)
    for i in range(3):
        assert uniforms(streams[i : i + 1], positions[i : i + 1]) == together[i]
    assert len(set(together)) == 3


def test_first_numbers_of_splitmix64_are_those_of_its_reference_implementation() -> None:
    # java.util.SplittableRandom(seed=1234567) and Vigna's splitmix64.c give this sequence.
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = uniforms(np.full(4, 1234567, np.uint64), np.arange(4))
    assert found.tolist() == [(number >> 12) * 2.0**-52 for number in reference]


@pytest.mark.parametrize("axis", ["positions of one seed", "one position of neighbouring seeds"])
def test_numbers_are_uniform_and_uncorrelated(axis: str) -> None:
    if axis.startswith("positions"):
        numbers = uniforms(np.full(COUNT, seeded_stream(42), np.uint64), np.arange(COUNT))
    else:
        streams = np.array([seeded_stream(seed) for seed in range(COUNT)], np.uint64)
        numbers = uniforms(streams, np.zeros(COUNT, np.int64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert kstest(numbers, "uniform").pvalue > 1e-4
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 5 / COUNT**0.5


def test_requests_without_a_seed_get_streams_that_the_engines_seed_repeats() -> None:
    def streams(seed: int) -> list[int]:
        source = UnseededStreams(seed)
        return [source.take() for _ in range(100)]

    assert streams(0) == streams(0)
    assert len({*streams(0), *streams(1), *(seeded_stream(seed) for seed in range(100))}) == 300
