"""The version of its messages and files that a process of nbengine speaks,
and the errors where two do not fit.

Engine, clients and tools may have loaded different versions of nbengine: it was reinstalled while a kernel or
an engine ran, or another machine has another version. A number tells them apart before anything else in a
message or file is read.
"""

from __future__ import annotations

PROTOCOL = 3
"""The protocol of this version. Raise it by one with every change after which processes from before and after
it would misunderstand each other: a field of a message, a connection file or shared memory that gets another
name, type or meaning, that goes or becomes required; a message that is to be answered. A new field with a
default, or a message that may be ignored, is no such change.

The fields and messages that tell the number must stay as they are: `protocol` in the connection file (with
`name`, `host_pid` and `run_dir`) and in `Attach`, `Attached`, `Hello` and `EngineHandshakeMetadata`, which
are maps with a `type`, and `Refused` as a whole.
"""
UNNAMED = 1
"""The protocol of a message or file that names none: the first protocol had no field for it."""


def client_mismatch(engine: str, engine_protocol: int, client_protocol: int, ending: str = "") -> str:
    """Say to the user of a client why it and an engine do not understand each other;
    `ending` says how to end the engine."""
    remedy = f"restart the engine{ending}"
    if engine_protocol > client_protocol:
        remedy = "restart this kernel or program, with the same nbengine as the engine's"
    return (
        f"{engine} speaks protocol {engine_protocol} of nbengine, this kernel or program protocol "
        f"{client_protocol}: {remedy}"
    )


def engine_mismatch(engine: str, theirs: int) -> str:
    """Say in an engine's log why the engine's own processes do not understand each other."""
    return (
        f"the processes of {engine} speak protocols {theirs} and {PROTOCOL} of nbengine, which was reinstalled "
        "meanwhile or is another one on another machine: restart the kernel or program that starts it, and the engine"
    )


FOR_UNNAMED = [{"type": client_mismatch("this engine", PROTOCOL, UNNAMED)}]
"""A text in the place where readers of the first protocol expect engine cores:
they show it in their error."""
