"""What a notebook remembers of its engines across a restart of its kernel.

The memory is a marker in each engine's run directory, which goes when the engine goes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from nbengine.client.connection import ConnectionInfo


class Ledger:
    """The engines that the notebook called `key` is attached to, in the order in which they came."""

    def __init__(self, key: str) -> None:
        self._marker = f"notebook-{key}"

    def add(self, engine: ConnectionInfo) -> None:
        """Remember an engine, as the last one; one that is just ending has no directory any more."""
        with contextlib.suppress(FileNotFoundError):
            self._path(engine).write_text(str(time.time_ns()))

    def remove(self, engine: ConnectionInfo) -> None:
        """Forget an engine."""
        self._path(engine).unlink(missing_ok=True)

    def among(self, engines: Iterable[ConnectionInfo]) -> list[ConnectionInfo]:
        """Those of `engines` that are remembered, the last one last."""
        remembered = {}
        for engine in engines:
            try:
                remembered[int(self._path(engine).read_text())] = engine
            except (FileNotFoundError, ValueError):
                continue
        return [remembered[when] for when in sorted(remembered)]

    def _path(self, engine: ConnectionInfo) -> Path:
        return Path(engine.run_dir) / self._marker
