"""The other half of the worlds of `test_worlds.py`, for another process of pytest."""

from __future__ import annotations

import pytest

from tests.simulation.batch import Batch, batches, violations


@pytest.mark.parametrize("batch", batches(1, 2), ids=lambda batch: str(batch[0]))
def test_nothing_happens_that_never_may(batch: Batch) -> None:
    found = violations(batch)
    assert not found, "\n".join(found)
