"""The place of the run store: beside IPython's own history."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from nbengine.ipc.private import make_own_directory

VARIABLE = "NBENGINE_RUNS_DIR"
REMEDY = f"{VARIABLE} chooses another directory"
_NAME = "runs.sqlite"


def store_path() -> Path:
    """Return the path of the store, which may not exist.

    It lies in the directory `nbengine` of the running IPython's profile, without one in that of the default
    profile, or in the directory that the environment's `NBENGINE_RUNS_DIR` names.
    """
    named = os.environ.get(VARIABLE)
    return (Path(named) if named else _profile() / "nbengine") / _NAME


def make_store_file(path: Path) -> None:
    """Make an empty file for the store, in a directory of this user's alone (0700), unless it exists.

    The file is its owner's alone (0600), also one that came from elsewhere.

    Raises:
        NBEngineError: the directory cannot be made, or others could replace what is in it.
        OSError: the file cannot be made.
    """
    make_own_directory(path.parent, "the directory of the runs", REMEDY)
    # A file that exists is not opened: closing it would give up the locks of this process's own connections.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)


def _profile() -> Path:
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is not None and shell.profile_dir is not None:
            return Path(shell.profile_dir.location)
    from IPython.paths import get_ipython_dir

    return Path(get_ipython_dir()) / "profile_default"
