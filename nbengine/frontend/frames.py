"""Tables of rows, as pandas has them, where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from nbengine.errors import NotSupportedError


def frame_of(rows: Callable[[], list[dict[str, Any]]]) -> Any:
    """Return the rows that `rows` gives as a pandas DataFrame.

    Raises:
        NotSupportedError: pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise NotSupportedError(
            "to_frame() needs pandas, which is not installed: `pip install pandas`, or take .rows()"
        ) from None
    return pandas.DataFrame(rows())
