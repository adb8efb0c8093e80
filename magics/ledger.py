"""What a kernel remembers of its engines across a restart: their names, in a file of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from nbengine.client.connection import list_connections, runtime_dir


class Ledger:
    """The names of one notebook's engines, the default last."""

    def __init__(self, key: str) -> None:
        self._key = key

    @property
    def path(self) -> Path:
        """The file, in the directory of the connection files."""
        return runtime_dir() / "nbengine-sessions" / f"{self._key}.json"

    def read(self) -> list[str]:
        """The names, empty if nothing is remembered."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=list[str])
        except (FileNotFoundError, msgspec.MsgspecError):
            return []

    def write(self, names: list[str]) -> None:
        """Replace the names. Without any the file goes, and so do files whose engines have all gone."""
        path = self.path
        if not names:
            path.unlink(missing_ok=True)
            _remove_stale(path.parent)
            return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(msgspec.json.encode(names))
        os.replace(temporary, path)
        _remove_stale(path.parent)


def _remove_stale(directory: Path) -> None:
    alive = {info.name for info in list_connections() if info.host_alive}
    for path in directory.glob("*.json"):
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            if not alive.intersection(msgspec.json.decode(path.read_bytes(), type=list[str])):
                path.unlink(missing_ok=True)
