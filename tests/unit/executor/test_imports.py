"""The garbage collector does not look at what a process imports for good."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from nbengine.runtime.imports import imports_that_stay


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    gc.unfreeze()
    if was_enabled:
        gc.enable()
    else:
        gc.disable()


def test_the_collector_does_not_run_within_and_does_not_look_at_what_was_made_afterwards() -> None:
    gc.enable()
    with imports_that_stay():
        assert not gc.isenabled()
        made: list[object] = [[]]
    assert gc.isenabled()
    assert not any(item is made for item in gc.get_objects())


def test_a_failed_import_lets_the_collector_run_again() -> None:
    gc.enable()
    with pytest.raises(ImportError), imports_that_stay():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with imports_that_stay():
        pass
    assert not gc.isenabled()
