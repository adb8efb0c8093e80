"""The parameters of a draw, as kernels read them."""

from __future__ import annotations

import numpy as np

DRAW_ROW = np.dtype(
    [
        ("inverse", np.float32),
        ("log_min_p", np.float32),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("uniform", np.float64),
        ("stream", np.uint64),
        ("number", np.int64),
    ],
    align=True,
)
"""The parameters of a row: the inverse of its temperature (0: greedy), the logarithm of min-p (minus infinity: off), top-p
(1: off), top-k (0: off), and its random number in [0, 1), which is that of a place in a stream."""

UNDECIDED = -2
"""The token of a row whose filters keep more tokens than a kernel looks at."""


def place_of(name: str) -> int:
    """Return the byte of a parameter in its row."""
    assert DRAW_ROW.fields is not None
    return int(DRAW_ROW.fields[name][1])
