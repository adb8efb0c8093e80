"""Directories that no other user can reach."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nbengine.errors import NBEngineError


def check_private(directory: str | Path, what: str) -> None:
    """Raise `NBEngineError` unless `directory`, called `what`, is there and is this user's alone."""
    try:
        status = os.lstat(directory)
    except OSError as error:
        raise NBEngineError(f"{what} {directory} is not here: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise NBEngineError(f"{what} {directory} is not this user's alone")
