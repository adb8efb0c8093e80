"""The compiled CPU kernels, kept on disk for later processes.

A worker compiles its kernels when it starts, for this processor and the model's shape. That takes half a
second of computing, and the next start needs the same code.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import platform
from pathlib import Path

from nbengine.errors import NBEngineError
from nbengine.ipc.private import check_private, make_own_directory, read_own, write_own
from nbengine.kernels.cpu.jit import COMPILER_LIBRARY, keep_machine_code
from nbengine.models.checkpoints.storage import cache_dir
from nbengine.runtime.heap import unmap_library

logger = logging.getLogger(__name__)

MOST_FILES = 1024
"""The most files that are kept. A model's shape has about twenty, of 5 to 50 KiB each."""
_NAME = "the directory of compiled kernels"
_LARGEST = 16 << 20
_DIGEST_BYTES = 32
_CPUINFO = Path("/proc/cpuinfo")
_FACTS = ("model", "stepping", "microcode", "flags", "Features", "CPU ")
"""The beginnings of its lines that are facts of a processor, on x86 and on Arm; others are clocks."""


class KernelStore:
    """Object files in a directory of this user's, the most recently used `most_files` of them.

    A file begins with a digest of its key and its code: linking half a file would end the process. Whatever
    happens to the directory harms nobody: what cannot be read or written is compiled. Machines that share the
    directory have files of their own, because code is tried on the `machine` for which it is kept.
    """

    def __init__(self, directory: Path, most_files: int = MOST_FILES, machine: str = "") -> None:
        self._directory = directory
        self._most_files = most_files
        self._machine = machine

    def get(self, key: str) -> bytes | None:
        """See `nbengine.kernels.cpu.jit.MachineCodeStore.get`."""
        try:
            check_private(self._directory, _NAME)
            content, _ = read_own(self._path(key), _LARGEST)
        except FileNotFoundError:
            return None
        except NBEngineError as error:
            # The first start finds no directory, which needs no warning.
            logger.log(
                logging.WARNING if os.path.exists(self._directory) else logging.DEBUG, "compiling: %s", error
            )
            return None
        code = content[_DIGEST_BYTES:]
        if not hmac.compare_digest(content[:_DIGEST_BYTES], _digest(key, code)):
            logger.warning("compiling: %s is damaged", self._path(key))
            return None
        # Its age says how long it has not been used. The file may be gone, or the disk be read-only.
        with contextlib.suppress(OSError):
            os.utime(self._path(key))
        return code

    def put(self, key: str, code: bytes) -> None:
        """See `nbengine.kernels.cpu.jit.MachineCodeStore.put`."""
        try:
            make_own_directory(self._directory, _NAME, "set NBENGINE_CACHE_DIR")
            check_private(self._directory, _NAME)
            write_own(self._path(key), _digest(key, code) + code)
            self._drop_oldest()
        except (OSError, NBEngineError) as error:
            logger.info("compiled kernels are not kept: %s", error)

    def _drop_oldest(self) -> None:
        files = [path for path in self._directory.iterdir() if path.suffix == ".o"]
        if len(files) > self._most_files:
            files.sort(key=_last_use)
            for path in files[: len(files) - self._most_files]:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(f"{self._machine} {key}".encode()).hexdigest()
        return self._directory / f"{name}.o"


def keep_kernels() -> None:
    """Have this process use the kernels that earlier ones compiled, and keep its own.

    A model that lies in a directory of its own needs no cache directory: without one, kernels are compiled.
    """
    try:
        store = KernelStore(cache_dir() / "kernels", machine=_machine())
    except NBEngineError as error:
        logger.info("compiled kernels are not kept: %s", error)
        store = None
    keep_machine_code(store)


def _machine() -> str:
    """Return what decides beside the instruction sets whether code is right: the processor's make and microcode, whether
    it is a virtual one, and the system. Containers of a machine have the same."""
    facts = [platform.release()]
    with contextlib.suppress(OSError):
        processor, _, _ = _CPUINFO.read_text(errors="replace").partition("\n\n")
        facts += [line for line in processor.splitlines() if line.startswith(_FACTS)]
    return " ".join(facts)


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # another process has dropped it


def unmap_compiler() -> None:
    """Give up the memory that holds the compiler's code, some 46 MiB, for the time in which nothing is compiled."""
    unmap_library(COMPILER_LIBRARY)
