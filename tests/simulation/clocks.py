"""`time`, `secrets` and `uuid`: virtual time, and random numbers that a seed draws."""

from __future__ import annotations

import uuid

from tests.simulation import state


def monotonic() -> float:
    """`time.monotonic`, of all processes of the machine alike."""
    return 5000.0 + state.hub().now


def wall_time() -> float:
    """`time.time`."""
    hub = state.hub()
    return hub.wall_offset + hub.now


def sleep(seconds: float) -> None:
    """`time.sleep`."""
    state.hub().sleep(seconds)


def token_bytes(size: int | None = None) -> bytes:
    """`secrets.token_bytes`."""
    return state.world().secrets.randbytes(32 if size is None else size)


def token_hex(size: int | None = None) -> str:
    """`secrets.token_hex`."""
    return token_bytes(size).hex()


def uuid4() -> uuid.UUID:
    """`uuid.uuid4`."""
    return uuid.UUID(bytes=token_bytes(16), version=4)
