"""The resources of compiled Triton kernels, kept in the tests' cache: compiling them takes most of a minute.

They depend on nothing but the kernel's source and what it calls, the signature, the target and Triton's version; all of
these are in the name under which they are kept. `make thorough` compiles always.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from tests.support.thorough import THOROUGH

FOLDER = "triton"


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel: bytes of spilled registers and of shared memory a program."""

    spilled: int
    shared: int


@dataclass(frozen=True)
class KeptResources:
    """A folder, `directory`, that keeps them."""

    directory: Path

    def place(
        self,
        arch: int,
        kernel: Any,
        signature: dict[str, str],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> Path:
        """Return the file of a kernel that is compiled in this way."""
        ways = [repr(sorted(way.items())) for way in (signature, constants, options)]
        everything = "\n".join([triton.__version__, kernel.cache_key, str(arch), *ways])
        return self.directory / f"{hashlib.sha256(everything.encode()).hexdigest()[:32]}.json"

    @staticmethod
    def find(place: Path) -> Resources | None:
        """Return what is kept; None if nothing is."""
        if THOROUGH or not place.exists():
            return None
        place.touch()
        return Resources(**json.loads(place.read_text()))

    def keep(self, place: Path, resources: Resources) -> None:
        """Keep what a compilation has found."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = place.with_suffix(".tmp")
        partial.write_text(json.dumps(asdict(resources)))
        partial.rename(place)
