"""Engines of other versions of nbengine: they are listed, but no client can attach to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nbengine.errors import NBEngineError, ProtocolMismatchError
from nbengine.ipc.liveness import identity_of, machine_id, was_started_again
from nbengine.runtime.connection import connection_files, read_connection, read_label


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """A connection file that speaks another protocol."""

    log_path: str
    note: str
    """One line that says which versions meet and what to do."""
    may_live: bool
    """The engine is not known to be dead: its host's pid is in use, or means nothing here."""


def other_engines() -> list[OtherEngine]:
    """List this user's engines that have a connection file of another protocol."""
    found = [other_engine(path) for path in connection_files()]
    return [engine for engine in found if engine is not None]


def other_engine(path: Path) -> OtherEngine | None:
    """Read a connection file; return its engine if that speaks another protocol."""
    try:
        read_connection(path)
    except ProtocolMismatchError as error:
        try:
            label = read_label(path)
        except FileNotFoundError:
            # The engine has ended since, and has taken its file along.
            return None
        # Only the beginning of a machine id is known to mean the same in every version.
        boot, _, _ = label.machine.partition(":")
        elsewhere = boot not in ("", machine_id().partition(":")[0])
        may_live = elsewhere or identity_of(label.host_pid) is not None
        is_gone = was_started_again(label.machine, label.lasting_machine)
        return OtherEngine(label.log_path, str(error), may_live and not is_gone)
    except NBEngineError:
        return None
    return None
