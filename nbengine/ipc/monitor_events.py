"""The events of a ZeroMQ socket, as its monitor tells them.

`zmq.utils.monitor` reads them, too, but imports asyncio and ssl, which no process of an engine needs: that would
be a tenth of what the host's start takes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import zmq

_EVENT = struct.Struct("=Hi")


class MonitorEvent(NamedTuple):
    """An event, one of `zmq.EVENT_…`, and its number: a descriptor for most kinds."""

    event: int
    value: int


def receive_event(monitor: zmq.Socket[bytes]) -> MonitorEvent:
    """Take the next event from a monitor's PAIR socket; the second frame, the address, is left out."""
    what, *_ = monitor.recv_multipart()
    return MonitorEvent(*_EVENT.unpack(what))
