"""The prepared directory of a GGUF file: the JSON files that other formats bring along, made once and cached.

The tokenizer is converted by transformers, whose import brings torch with it. It therefore happens in a child
process (`nbengine.models.checkpoints.gguf_tokenizer`), and the process that asks stays free of torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.storage import cache_dir, new_directory
from nbengine.models.configs.hf_config import read_json_object
from nbengine.runtime.progress import Reporter

_FORMAT = 4
"""A part of the cache key, to be raised whenever the content of a prepared directory changes."""
REFUSED = 3
"""The exit status of the child when it has printed a message for the user instead of a traceback."""


def prepared_directory(gguf: Path, report: Reporter, advised: Mapping[str, float] | None = None) -> Path:
    """Return a directory with config.json, generation_config.json and the tokenizer of the GGUF file at
    `gguf`.

    Args:
        advised: sampling parameters for generation_config.json, by their names there, where the file has
            none.

    Raises:
        ModelLoadError: the file is corrupt or of an unsupported kind, or the cache cannot be written.
    """
    destination = cache_dir() / "prepared" / _key(gguf, advised or {})
    if destination.is_dir():
        return destination
    _check_magic(gguf)
    report(f"converting the tokenizer of {gguf.name}")
    with new_directory(destination) as content:
        _convert(gguf, content)
        if advised:
            path = content / "generation_config.json"
            path.write_text(json.dumps({**advised, **read_json_object(path)}, indent=2))
    return destination


def _key(gguf: Path, advised: Mapping[str, float]) -> str:
    try:
        stat = gguf.stat()
    except OSError as error:
        raise ModelLoadError(f"cannot read {gguf}: {error}") from error
    identity: tuple[object, ...] = (
        _FORMAT,
        version("transformers"),
        gguf.resolve(),
        stat.st_size,
        stat.st_mtime_ns,
    )
    identity += tuple(sorted(advised.items()))
    digest = hashlib.sha256("\0".join(map(str, identity)).encode()).hexdigest()
    return f"{gguf.stem[:80]}-{digest[:16]}"


def _check_magic(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(f"cannot read {gguf}: {error}") from error
    if magic != b"GGUF":
        raise ModelLoadError(f"{gguf}: not a GGUF file (it does not start with the bytes GGUF)")


def _convert(gguf: Path, content: Path) -> None:
    command = [sys.executable, "-m", "nbengine.models.checkpoints.gguf_tokenizer", str(gguf), str(content)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode == REFUSED:
        raise ModelLoadError(done.stderr.strip())
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ModelLoadError(f"cannot convert the tokenizer of {gguf}: {lines[-1]}")
