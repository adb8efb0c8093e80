"""Messages between processes about a server: the order to start one, and the record of one that runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from nbengine.errors import NBEngineError
from nbengine.ipc.liveness import ProcessIdentity, is_alive, this_process
from nbengine.ipc.private import read_own, write_own
from nbengine.runtime.connection import ConnectionInfo
from nbengine.server.settings import ServerSettings

_MOST_BYTES = 1 << 16
_PATTERN = "server-*.json"


class ServerRecord(msgspec.Struct, tag="record"):
    """A server that answers requests; it lies beside the sockets of its engine."""

    url: str
    model_names: tuple[str, ...]
    wants_key: bool
    pid: int
    started: int

    @classmethod
    def here(cls, url: str, model_names: Sequence[str], wants_key: bool) -> ServerRecord:
        """Make the record of a server in this process."""
        process = this_process()
        return cls(url, tuple(model_names), wants_key, process.pid, process.started)

    def __str__(self) -> str:
        access = "with an API key" if self.wants_key else "for this machine only, without an API key"
        return f"{', '.join(self.model_names)} at {self.url}/v1 {access}"

    @property
    def process(self) -> ProcessIdentity:
        """Return the server's process."""
        return ProcessIdentity(self.pid, self.started)


class StartFailure(msgspec.Struct, tag="failure"):
    """The reason why a server has not started."""

    message: str


class ServerOrder(msgspec.Struct):
    """The order to serve a running engine. It goes through a pipe, since it may have keys."""

    engine: str
    connection: str
    """The engine's name, or its connection file."""
    settings: ServerSettings
    ready_fd: int
    """The pipe for the record, or for the reason of a failure."""


def url_of(host: str, port: int) -> str:
    """Return the URL of a server: `http://127.0.0.1:8000`, to which clients add `/v1`."""
    shown_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown_host}]:{port}" if ":" in shown_host else f"http://{shown_host}:{port}"


def servers_of(info: ConnectionInfo) -> list[ServerRecord]:
    """List the servers of an engine on this machine that run."""
    if not info.is_here or info.is_before_boot:
        return []
    found = []
    for path in sorted(Path(info.run_dir).glob(_PATTERN)):
        # It may be removed meanwhile, or be another user's.
        with contextlib.suppress(OSError, NBEngineError, msgspec.MsgspecError):
            record = msgspec.json.decode(read_own(path, _MOST_BYTES)[0], type=ServerRecord)
            if is_alive(record.process):
                found.append(record)
    return found


@contextlib.contextmanager
def written_record(info: ConnectionInfo, record: ServerRecord) -> Iterator[None]:
    """Keep a server's record beside its engine's sockets, if the engine is on this machine."""
    if not info.is_here:
        yield
        return
    path = Path(info.run_dir, f"server-{os.getpid()}.json")
    try:
        write_own(path, msgspec.json.encode(record))
    except OSError as error:
        raise NBEngineError(f"the server cannot leave its record: {error}") from error
    try:
        yield
    finally:
        # The engine may have removed its directory.
        with contextlib.suppress(OSError):
            os.unlink(path)
