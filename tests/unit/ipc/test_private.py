"""Reading files that are this user's alone."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from nbengine.errors import NBEngineError
from nbengine.ipc.private import read_own

LIMIT = 16 << 20


def test_reading_a_small_file_allocates_little_whatever_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    path.chmod(0o600)
    tracemalloc.start()
    content, _ = read_own(path, LIMIT)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert content == b"x" * 1000
    assert most < LIMIT / 16


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_a_file_of_the_largest_size_is_read_and_a_larger_one_is_not(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    path.chmod(0o600)
    assert read_own(path, size)[0] == b"x" * size
    path.write_bytes(b"x" * (size + 1))
    with pytest.raises(NBEngineError, match="has more than"):
        read_own(path, size)
