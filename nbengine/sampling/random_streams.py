"""Counter-based random numbers: one stream a request, one number an output position.

The number at a position is a hash of (stream, position), so a request draws the same numbers whatever else is
in its batch, however its prompt was chunked, and after any preemption: there is no state to carry.

The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), read
at an arbitrary index instead of stepped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_UNIT = 2.0**-52


def seeded_stream(seed: int) -> int:
    """Return the stream of a seed: 64 bits, well mixed so that neighbouring seeds share nothing."""
    x = (seed + _GAMMA) & _MASK
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)


class UnseededStreams:
    """The streams of requests without their own seed, one after another.

    The engine's seed and the number of such requests before it decide about a stream: a script that is run
    again gives the same answers, and all workers of an engine draw alike.
    """

    def __init__(self, seed: int) -> None:
        self._next = seeded_stream(seed)

    def take(self) -> int:
        """Return the next stream."""
        self._next = (self._next + _GAMMA) & _MASK
        return seeded_stream(self._next)


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the uniform number in [0, 1) of each (stream, position) pair, with 52 random bits.

    52 and not 53 bits: then `u * total < total` holds for every positive float64 `total` after rounding too,
    which inverting a cumulative sum relies on.
    """
    x = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    x += streams
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(12)
    return x.astype(np.float64) * _UNIT
