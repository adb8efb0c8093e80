"""Lines that start engines with the tests' own executor."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _slow_file() -> Path:
    return Path(tempfile.gettempdir()) / f"paced-slowly-{os.getpid()}"


@contextmanager
def slowly() -> Iterator[None]:
    """Have all engines of this process's tests write ten tokens a second, so that no answer ends within the block."""
    _slow_file().touch()
    try:
        yield
    finally:
        _slow_file().unlink()


def start_line(*, name: str = "", blocks: int = 256, max_model_len: int = 4096, **knobs: object) -> str:
    """A `%engine start` of an engine that writes the alphabet at a steady pace."""
    chosen = f"--name {name} " if name else ""
    return (
        f"%engine start random-tiny {chosen}--num-blocks {blocks} --max-model-len {max_model_len} "
        "--distributed-executor-backend notebook_support.paced_executor:PacedExecutor "
        f"--hf-overrides '{json.dumps({'max_position_embeddings': 100_000, 'slow_file': str(_slow_file()), **knobs})}'"
    )
