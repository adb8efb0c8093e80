"""The cache of the tests and benchmarks, `tests` in the user's cache.

The user's own would get entries for each model that a test makes, and nobody would ask for them again. Here they go when no
run is left that uses them. What real models need costs seconds of computing, and is kept: the models themselves (links to
the user's), their tokenizers and packed weights, what transformers has read of them, all compiled kernels, of which
`KernelStore` keeps the last thousand, and what `tests/kernels/kept_resources.py` knows of Triton's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from nbengine.models.checkpoints.storage import cache_dir

MODELS = ("smollm2-135m", "all-minilm-l6-v2")
"""Models that are not made, but fetched."""
REAL = (*MODELS, "SmolLM2-135M-Instruct")
"""The beginnings of the names of what is made of them."""
KINDS = ("models", "oracles", "prepared", "weights")
UNUSED_SECONDS = 7 * 24 * 3600.0
"""After this time without use, an entry of a real model is taken to be of a layout that was given up."""


def make() -> Path:
    """Make the cache, with links to the real models that the user has; return its place."""
    users = cache_dir()
    own = users / "tests"
    models = own / "models"
    models.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in MODELS:
        link = models / name
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
        if (users / "models" / name).is_dir() and not link.exists():
            # Another run may make it at the same time.
            with contextlib.suppress(FileExistsError):
                link.symlink_to(users / "models" / name)
    return own


def adopt(own: Path) -> None:
    """Note that a run which begins now may use whatever there is, also when the run that made it has ended."""
    now = time.time()
    for path in _entries(own):
        # Another run may remove it at the same time.
        with contextlib.suppress(OSError):
            if not path.is_symlink() and not path.name.startswith(REAL):
                os.utime(path, (now, now))


def _entries(own: Path) -> list[Path]:
    return [path for kind in KINDS if (own / kind).is_dir() for path in (own / kind).iterdir()]


def prune(own: Path, began: float) -> None:
    """Remove the entries of models that tests made, unless a run may use them that began at the time `began`."""
    now = time.time()
    entries = _entries(own)
    # Writers that were killed leave these.
    entries += (own / "kernels").glob(".*.tmp")
    reports = list((own / "triton").glob("*"))
    for path in entries + reports:
        limit = now - UNUSED_SECONDS if path.name.startswith(REAL) or path in reports else began
        with contextlib.suppress(OSError):
            if not path.is_symlink() and path.stat().st_mtime < limit:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
