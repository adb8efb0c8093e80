"""How often a test repeats its proof: often enough in each run, and many more times in `make thorough`."""

from __future__ import annotations

import os
from typing import TypeVar

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

T = TypeVar("T")


def amount(quick: T, *, thorough: T) -> T:
    """Return the first one, or in `make thorough` the other: numbers of repeats, or lists of parameters.

    The quick one proves the property; the thorough one proves it with more numbers.
    """
    return thorough if THOROUGH else quick
