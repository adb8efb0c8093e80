"""The subscribers to what the host publishes, with limits on what they may write and cause."""

from __future__ import annotations

import contextlib
import math
import os
import socket as sockets
import struct
from collections.abc import Collection

import zmq

from nbengine.errors import WireError
from nbengine.ipc.control_messages import WantEvents
from nbengine.ipc.messages import EventTopic
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.sockets import IPC_PREFIX
from nbengine.ipc.transport import bound_address, port_of

SUBSCRIPTION_HWM = 16
"""Most messages of one subscriber that wait to be read."""
STRANGE_TOPICS = 16
"""Most subscriptions of a connection to unknown topics; with more it is cut, because ZeroMQ remembers each of
them while the connection stands, at a cost of kilobytes."""
WISH_INTERVAL = 0.05
"""Least seconds between two wishes to engine cores for a snapshot of one topic."""

_UNSUBSCRIBE, _SUBSCRIBE = b"\x00", b"\x01"
_CREDENTIALS = struct.Struct("3i")


class Subscribers:
    """A reader of subscribers' messages from an XPUB that publishes under `topics`."""

    def __init__(self, socket: zmq.Socket[bytes], topics: Collection[bytes], log: PeerLog) -> None:
        self._socket = socket
        self._topics = topics
        self._log = log
        self._address = bound_address(socket)
        self._strange: dict[int, tuple[int, int]] = {}
        """By the descriptor of a connection that may still stand, its inode and its number of subscriptions
        to unknown topics."""

    def receive(self) -> list[bytes]:
        """Return the frames of the next message.

        Raises:
            zmq.Again: there is no message.
            WireError: the message is a subscription to an unknown topic, or the end of one.
        """
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        first = frames[0].bytes
        kind, topic = first[:1], first[1:]
        is_subscription = len(frames) == 1 and kind in (_SUBSCRIBE, _UNSUBSCRIBE)
        if is_subscription and not any(known.startswith(topic) for known in self._topics):
            if kind == _SUBSCRIBE:
                self._note_strange(frames[0])
            raise WireError(f"there is no topic {topic[:16]!r}")
        return [frame.bytes for frame in frames]

    def _note_strange(self, frame: zmq.Frame) -> None:
        try:
            descriptor, sender = int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address"))
            connection = sockets.socket(fileno=os.dup(descriptor))
        except (zmq.ZMQError, OSError):
            # The connection has ended already.
            return
        # The copy stands for the same connection until it is closed, whatever becomes of the number.
        with connection:
            if not _may_have_sent(connection, sender, self._address):
                return
            inode = os.fstat(connection.fileno()).st_ino
            known, count = self._strange.get(descriptor, (inode, 0))
            count = count + 1 if known == inode else 1
            self._strange[descriptor] = inode, count
            if count > STRANGE_TOPICS:
                del self._strange[descriptor]
                self._log.warn_of("cut", "cut the connection of a subscriber to topics that there are not")
                # Only the end of a connection makes ZeroMQ forget its subscriptions.
                with contextlib.suppress(OSError):
                    connection.shutdown(sockets.SHUT_RDWR)


def _may_have_sent(connection: sockets.socket, sender: str, address: str) -> bool:
    """Return whether a connection comes from a message's sender to the socket that is bound to `address`.

    ZeroMQ names the sender of a message by "Peer-Address", and its connection by a descriptor, which another
    peer's connection may have by the time that the message is read. `sender` is the network address, or ends
    with the user, group and process at the other end of a UNIX socket where the system tells them.
    """
    try:
        here, there = connection.getsockname(), connection.getpeername()
        if connection.family != sockets.AF_UNIX:
            # A socket may be bound to all addresses of the machine.
            return (here[1], there[0]) == (port_of(address), sender)
        credentials = ""
        if hasattr(sockets, "SO_PEERCRED"):
            raw = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, gid = _CREDENTIALS.unpack(raw)
            credentials = f":{uid}:{gid}:{pid}"
    except (OSError, ValueError):
        # It has ended, or does not lead to a socket of this kind.
        return False
    return here == address.removeprefix(IPC_PREFIX) and sender.endswith(credentials)


class Wishes:
    """The wishes for events that engine cores are to be told: the newest of each topic, once.

    A wish for events causes a snapshot of everything, so it is told at most once in `WISH_INTERVAL`. The news
    that nobody follows a topic any more is told at once.
    """

    def __init__(self) -> None:
        self._wanted: dict[EventTopic, bool] = {}
        self._told: dict[EventTopic, bool] = {}
        self._not_before: dict[EventTopic, float] = {}

    @property
    def deadline(self) -> float:
        """Return when `take` has something to give, 0 for at once; infinity if there is nothing."""
        return min(map(self._due_at, self._wanted)) if self._wanted else math.inf

    def note(self, topic: EventTopic, wanted: bool) -> None:
        """Note that someone needs a snapshot and the events after it, or that nobody needs any."""
        if wanted or self._told.get(topic, False):
            self._wanted[topic] = wanted
        else:
            # The engine cores have not heard of the subscribers that are gone again.
            self._wanted.pop(topic, None)

    def take(self, now: float) -> list[WantEvents]:
        """Return the wishes that the engine cores have to be told now, and forget them."""
        if not self._wanted:
            return []
        wishes = [
            WantEvents(topic, self._wanted[topic]) for topic in self._wanted if self._due_at(topic) <= now
        ]
        for wish in wishes:
            del self._wanted[wish.topic]
            self._told[wish.topic] = wish.wanted
            if wish.wanted:
                self._not_before[wish.topic] = now + WISH_INTERVAL
        return wishes

    def _due_at(self, topic: EventTopic) -> float:
        return self._not_before.get(topic, 0.0) if self._wanted[topic] else 0.0
