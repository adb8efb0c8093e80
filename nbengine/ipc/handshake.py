"""Control messages on the wire, and the engine core's side of its handshake with the host.

A control message is one msgpack frame. In the handshake the core says HELLO, the host answers with the
coordinator's sockets, and the core loads its model (Progress) and says READY, or why it cannot.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec
import zmq

from nbengine.errors import EngineStartError, ProtocolMismatchError, WireError
from nbengine.ipc.control_messages import EngineDead, EngineHandshakeMetadata, Hello, HostToCore, Refused
from nbengine.ipc.protocol import PROTOCOL, UNNAMED, client_mismatch, engine_mismatch

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode_control(message: msgspec.Struct) -> bytes:
    """Encode one control message."""
    return _encoder.encode(message)


@functools.cache
def _decoder_of(messages: Any) -> msgspec.msgpack.Decoder[Any]:
    """The only one of its kind: it has no state, and takes longer to make than many a message to decode."""
    return msgspec.msgpack.Decoder(messages)


class ControlDecoder(Generic[T]):
    """The decoder of one direction's messages, for example `ControlDecoder[ClientToHost](ClientToHost)`."""

    def __init__(self, messages: Any) -> None:
        self._decoder = _decoder_of(messages)

    def decode(self, frame: bytes) -> T:
        """Decode one frame.

        Raises:
            ProtocolMismatchError: it opens a conversation in another protocol, whether it can be decoded or
                not.
            WireError: the bytes are not one of the messages.
        """
        try:
            message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, MemoryError) as error:
            _check_protocol(_protocol_of(frame))
            raise WireError(f"not a control message: {error}") from error
        _check_protocol(getattr(message, "protocol", PROTOCOL))
        return cast("T", message)


class _Opening(msgspec.Struct):
    """The part of an opening message that every version can read."""

    type: Literal["attach", "attached", "hello", "handshake"]
    protocol: int = UNNAMED


_opening_decoder = msgspec.msgpack.Decoder(_Opening)


def _protocol_of(frame: bytes) -> int:
    """Return the protocol that an opening message names;
    this process's if the frame is no opening message."""
    try:
        return _opening_decoder.decode(frame).protocol
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, MemoryError):
        return PROTOCOL


def _check_protocol(theirs: int) -> None:
    if theirs != PROTOCOL:
        raise ProtocolMismatchError(f"it speaks protocol {theirs} of nbengine, not {PROTOCOL}", theirs)


def refusal_for(engine: str, theirs: int) -> Refused | EngineDead:
    """Make the host's answer to a client of another protocol, in a form that the client knows."""
    line = client_mismatch(engine, PROTOCOL, theirs)
    return EngineDead(line, started=False) if theirs == UNNAMED else Refused(line)


def say_hello(
    control: zmq.Socket[bytes], rank: int, pid: int, timeout_ms: int = 30_000
) -> EngineHandshakeMetadata:
    """Open the handshake on the core's control socket and return the host's answer.

    Raises:
        EngineStartError: the host did not answer within `timeout_ms`, or answered with another message.
    """
    control.send(encode_control(Hello(rank=rank, pid=pid, protocol=PROTOCOL)))
    if not control.poll(timeout_ms):
        raise EngineStartError(f"the host did not answer engine core {rank} within {timeout_ms / 1000:g} s")
    try:
        answer = ControlDecoder[HostToCore](HostToCore).decode(control.recv())
    except ProtocolMismatchError as error:
        raise EngineStartError(engine_mismatch("this engine", error.theirs)) from None
    if not isinstance(answer, EngineHandshakeMetadata):
        raise EngineStartError(f"the host answered the handshake with {type(answer).__name__}")
    return answer
