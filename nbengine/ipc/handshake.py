"""Control messages on the wire, and the engine core's side of its handshake with the host.

A control message is one msgpack frame. The handshake: the core says HELLO, the host answers with the
coordinator's sockets, the core loads its model (Progress) and says READY, or why it cannot.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

import msgspec
import zmq

from nbengine.errors import EngineStartError, WireError
from nbengine.ipc.control_messages import EngineHandshakeMetadata, Hello, HostToCore

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode_control(message: msgspec.Struct) -> bytes:
    """Encode one control message."""
    return _encoder.encode(message)


class ControlDecoder(Generic[T]):
    """Decodes one direction's messages, for example `ControlDecoder[ClientToHost](ClientToHost)`."""

    def __init__(self, messages: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(messages)

    def decode(self, frame: bytes) -> T:
        """Decode one frame.

        Raises:
            WireError: the bytes are not one of the messages.
        """
        try:
            return cast("T", self._decoder.decode(frame))
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, MemoryError) as error:
            raise WireError(f"no control message: {error}") from error


def say_hello(
    control: zmq.Socket[bytes], rank: int, pid: int, timeout_ms: int = 30_000
) -> EngineHandshakeMetadata:
    """Open the handshake on the core's control socket and return the host's answer.

    Raises:
        EngineStartError: the host did not answer within `timeout_ms`, or with something else.
    """
    control.send(encode_control(Hello(rank=rank, pid=pid)))
    if not control.poll(timeout_ms):
        raise EngineStartError(f"the host did not answer engine core {rank} within {timeout_ms / 1000:g} s")
    answer = ControlDecoder[HostToCore](HostToCore).decode(control.recv())
    if not isinstance(answer, EngineHandshakeMetadata):
        raise EngineStartError(f"the host answered the handshake with {type(answer).__name__}")
    return answer
