"""This module refuses what has a model file's name and is not a regular file: opening a pipe would wait for a
writer that never comes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nbengine.errors import ModelLoadError

_SUFFIXES = {".safetensors", ".gguf", ".json", ".jinja", ".txt", ".model"}
_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def check_regular(path: Path) -> None:
    """Check that `path`, or what it links to, is a regular file or nothing at all.

    Raises:
        ModelLoadError: `path` is something else; the message says what.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        # It is missing, which those who open it will say.
        return
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise ModelLoadError(f"{path} is {kind}; a model's files must be regular files")


def check_regular_files(directory: Path) -> None:
    """Do what `check_regular` does for everything in a directory that has the name of a model's or
    tokenizer's file.

    Raises:
        ModelLoadError: a file is not regular; the message names it.
    """
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if Path(entry.name).suffix.lower() in _SUFFIXES)
    except OSError as error:
        raise ModelLoadError(f"cannot read {directory}: {error}") from error
    for name in names:
        check_regular(directory / name)
