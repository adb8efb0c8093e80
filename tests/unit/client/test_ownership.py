"""Only the process that made an object has what it owns; the process id tells a fork."""

from __future__ import annotations

import gc
import os

import pytest

from nbengine.client.link import ownership
from nbengine.client.link.ownership import Owned, finalize, is_forked_copy
from nbengine.errors import NBEngineError


class Frontend:
    engine = Owned[str]()


@pytest.fixture
def fork() -> int:
    """A process id that a forked child could have."""
    return os.getpid() + 1


def test_only_the_process_that_has_set_it_reads_an_owned_attribute(
    fork: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend, parent = Frontend(), os.getpid()
    assert not hasattr(frontend, "engine")
    frontend.engine = "engine"
    assert frontend.engine == "engine"
    assert not is_forked_copy(frontend, "engine")
    monkeypatch.setattr(ownership, "_own_pid", fork)
    with pytest.raises(
        NBEngineError, match=f"belongs to process {parent}, of which this one .{fork}. is a fork"
    ):
        _ = frontend.engine
    assert is_forked_copy(frontend, "engine")
    frontend.engine = "the child's own"
    assert frontend.engine == "the child's own"


@pytest.mark.parametrize("forked", [False, True])
def test_a_forked_copy_releases_nothing(fork: int, monkeypatch: pytest.MonkeyPatch, forked: bool) -> None:
    released: list[str] = []
    frontend = Frontend()
    finalize(frontend, lambda: released.append("engine"))
    if forked:
        monkeypatch.setattr(ownership, "_own_pid", fork)
    del frontend
    gc.collect()
    assert released == ([] if forked else ["engine"])
