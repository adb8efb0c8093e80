"""The encoding of objects that travel between processes of one user:
pickle 5, with large buffers beside the pickle.

    [number of buffers: u32 | bytes of the pickle: u64 | the pickle] then, a buffer: [bytes: u64 | the buffer]

Pickle runs any code that the data names: it is only for memory and sockets that no other user can reach.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from nbengine.errors import WireError

INLINE_BYTES = 64 << 10
"""Buffers of fewer bytes are part of the pickle: copying them twice costs less than handling them apart."""
_HEAD = struct.Struct("<IQ")
_SIZE = struct.Struct("<Q")

Part = bytes | memoryview


def encode(obj: object) -> list[Part]:
    """Encode an object as parts of a message, which are to be put one after another;
    buffers are not copied until then.

    Raises:
        WireError: `obj` cannot be pickled.
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < INLINE_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        data = pickle.dumps(obj, 5, buffer_callback=keep)
    except Exception as error:
        raise WireError(f"{type(obj).__name__} cannot be pickled: {type(error).__name__}: {error}") from error
    parts: list[Part] = [_HEAD.pack(len(buffers), len(data)), data]
    for buffer in buffers:
        parts += (_SIZE.pack(buffer.nbytes), buffer)
    return parts


def decode(view: memoryview) -> Any:
    """Decode the object; it holds no reference to `view`, and its buffers are writable.

    Raises:
        WireError: the pickle cannot be read here.
    """
    count, size = _HEAD.unpack_from(view)
    start = _HEAD.size
    end = start + size
    buffers = []
    place = end
    for _ in range(count):
        (length,) = _SIZE.unpack_from(view, place)
        place += _SIZE.size
        buffers.append(bytearray(view[place : place + length]))
        place += length
    try:
        return pickle.loads(view[start:end], buffers=buffers)
    except Exception as error:
        raise WireError(f"a message cannot be unpickled: {type(error).__name__}: {error}") from error
