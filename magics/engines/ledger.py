"""The memory that a notebook has of its engines across a restart of its kernel.

The memory is a marker in each engine's run directory, which is removed with the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator

from nbengine.errors import NBEngineError
from nbengine.ipc.private import is_private_directory, opened_directory, read_own
from nbengine.runtime.connection import ConnectionInfo

logger = logging.getLogger(__name__)

_MAX_BYTES = 64


class Ledger:
    """The engines to which the notebook called `key` is attached, in the order in which they came."""

    def __init__(self, key: str) -> None:
        self._marker = f"notebook-{key}"

    def add(self, engine: ConnectionInfo) -> None:
        """Remember an engine as the last one; one that is just ending has no directory any more.

        If the marker cannot be written, the engine is not found again after a restart of the kernel, and the
        log says so.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with self._opened(engine) as directory:
                descriptor = os.open(self._marker, flags, 0o600, dir_fd=directory)
                with os.fdopen(descriptor, "w") as file:
                    file.write(str(time.time_ns()))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.warning("a restarted kernel will not find engine %s by itself: %s", engine.name, error)

    def remove(self, engine: ConnectionInfo) -> None:
        """Forget an engine."""
        with contextlib.suppress(OSError, ValueError), self._opened(engine) as directory:
            os.unlink(self._marker, dir_fd=directory)

    def among(self, engines: Iterable[ConnectionInfo]) -> list[ConnectionInfo]:
        """Find those of `engines` that are remembered, the last one last."""
        remembered = {}
        for engine in engines:
            with contextlib.suppress(OSError, ValueError, NBEngineError), self._opened(engine) as directory:
                remembered[int(read_own(self._marker, _MAX_BYTES, directory)[0])] = engine
        return [remembered[when] for when in sorted(remembered)]

    @contextlib.contextmanager
    def _opened(self, engine: ConnectionInfo) -> Iterator[int]:
        with opened_directory(engine.run_dir) as directory:
            if not is_private_directory(os.fstat(directory)):
                raise PermissionError(f"{engine.run_dir} is not this user's alone")
            yield directory
