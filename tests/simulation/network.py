"""ZeroMQ in memory: what this project uses of it, with delays between connections and losses where one breaks.

Messages of one connection keep their order; those of different connections do not. A ROUTER drops what is for a peer
that it does not know. When a process dies, what it has sent may have left it, up to some message, or not.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from tests.simulation import state

if TYPE_CHECKING:
    from tests.simulation.sockets import SimSocket


Frames = tuple[bytes, ...]


RETRY_INTERVAL = 0.1
"""Seconds between two attempts to connect."""


class PeerName(bytes):
    """An identity that a ROUTER has given; its hash is the same in every run."""

    def __hash__(self) -> int:
        return int.from_bytes(self, "little")


class Again(zmq.Again):
    """`zmq.Again`, made without asking for the text of its number."""

    errno = errno.EAGAIN
    strerror = "Resource temporarily unavailable"
    __init__ = Exception.__init__


class Tracker:
    """`zmq.MessageTracker`."""

    done = False


class Network:
    """All addresses of a world."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw
        """Gives random numbers below 1."""
        self.listeners: dict[str, SimSocket] = {}
        self.waiting: dict[str, list[Link]] = {}
        """Connections whose listener is not there, by address."""
        self.numbers = itertools.count(1)
        self.delay = 100e-6
        """Seconds that a message takes at most, as a rule."""
        self.long_delay = 0.0
        self.long_delay_chance = 0.0
        self.open_sockets: dict[int, SimSocket] = {}

    def latency(self) -> float:
        """Seconds that one message takes."""
        draw = self.draw
        if self.long_delay_chance and draw() < self.long_delay_chance:
            return draw() * self.long_delay
        return draw() * self.delay

    def name_is_back(self, address: str) -> None:
        """Let those connect that have waited for the file of an address, which is there now."""
        for link in self.waiting.pop(address, []):
            state.hub().call_later(self.latency(), link.try_to_connect)


class Channel:
    """One direction of a connection."""

    __slots__ = ("broken", "in_flight", "last_at", "receiver", "sender", "wrap")

    def __init__(self, sender: SimSocket, receiver: SimSocket, wrap: Callable[[Frames], Frames]) -> None:
        self.sender = sender
        self.receiver = receiver
        self.wrap = wrap
        self.in_flight: deque[tuple[Frames, Tracker | None]] = deque()
        self.last_at = 0.0
        self.broken = False

    def send(self, frames: Frames, tracker: Tracker | None = None) -> None:
        world = state.world()
        hub = world.hub
        self.in_flight.append((frames, tracker))
        arrives = hub.now + world.network.latency()
        self.last_at = max(self.last_at, arrives)
        hub.call_at(self.last_at, self._arrive)

    def _arrive(self) -> None:
        if self.broken or not self.in_flight:
            return
        process = self.receiver.process
        if process.is_stopped:
            process.on_continue.append(self._arrive)
            return
        frames, tracker = self.in_flight.popleft()
        if tracker is not None:
            tracker.done = True
        hub = state.hub()
        if hub.trace is not None:
            hub.say(f"{self.sender!r} -> {self.receiver!r}: {_show(frames)}")
        self.receiver.take(self.wrap(frames))
        self.sender.changed()

    def cut(self) -> None:
        """Lose what has not left the sender, which is gone."""
        num_left = state.hub().random.randint(0, len(self.in_flight))
        while len(self.in_flight) > num_left:
            _, tracker = self.in_flight.pop()
            if tracker is not None:
                tracker.done = True


class Link:
    """A socket's connection to an address, which may be made, lost and made again."""

    def __init__(self, connector: SimSocket, address: str) -> None:
        self.connector = connector
        self.address = address
        self.queue: deque[tuple[Frames, Tracker | None]] = deque()
        """Sent before there is a connection."""
        self.listener: SimSocket | None = None
        self.up: Channel | None = None
        self.down: Channel | None = None
        self.closed = False
        self.lingers_until = math.inf
        """Until when a closed socket tries to get rid of what it has."""
        self.name = PeerName(b"")

    @property
    def num_queued(self) -> int:
        return len(self.queue) + (0 if self.up is None else len(self.up.in_flight))

    @property
    def holds_something(self) -> bool:
        """Return whether anything that was sent in either direction has not arrived."""
        return bool(self.num_queued or (self.down is not None and self.down.in_flight))

    def send(self, frames: Frames, tracker: Tracker | None = None) -> None:
        if self.up is None:
            self.queue.append((frames, tracker))
        else:
            self.up.send(frames, tracker)

    def try_to_connect(self) -> None:
        """Make the connection if there is a listener, else wait for one."""
        world = state.world()
        if self.closed or self.listener is not None or world.over or world.hub.now > self.lingers_until:
            return
        listener = world.network.listeners.get(self.address)
        if listener is None or listener.closed or not _is_there(self.address):
            world.network.waiting.setdefault(self.address, []).append(self)
            return
        for process in (self.connector.process, listener.process):
            if process.is_stopped or process.has_no_files_left:
                world.hub.call_later(RETRY_INTERVAL, self.try_to_connect)
                return
        identity = self.connector.identity
        if listener.kind == zmq.ROUTER:
            self.name = PeerName(identity or b"\0" + next(world.network.numbers).to_bytes(4, "big"))
            key = bytes(self.name)
            rival = listener.peers.get(key)
            if rival is not None:
                if not listener.options.get(zmq.ROUTER_HANDOVER):
                    return
                rival.disconnect(reconnects=False)
            listener.peers[key] = self
        self.listener = listener
        listener.links.append(self)
        name = self.name
        if listener.kind == zmq.ROUTER:
            self.up = Channel(self.connector, listener, lambda frames: (name, *frames))
        else:
            self.up = Channel(self.connector, listener, lambda frames: frames)
        self.down = Channel(listener, self.connector, lambda frames: frames)
        for topic in self.connector.topics:
            self.up.send((b"\x01" + topic,))
        while self.queue:
            self.up.send(*self.queue.popleft())
        listener.stir()
        if self.lingers_until < math.inf:
            self.closed = True
            self.disconnect_when_empty(self.up)
        else:
            self.connector.stir()

    def disconnect(self, *, reconnects: bool = True) -> None:
        """Lose the connection; what has arrived has arrived."""
        listener, self.listener = self.listener, None
        for channel in (self.up, self.down):
            if channel is not None:
                channel.broken = True
        if self.up is not None:
            # What the socket has not got rid of waits for the next connection; what was under way is lost.
            self.up.in_flight.clear()
        self.up = self.down = None
        if listener is not None:
            if self in listener.links:
                listener.links.remove(self)
            key = bytes(self.name)
            if listener.peers.get(key) is self:
                del listener.peers[key]
            listener.lose(self)
            listener.stir()
        if reconnects and not self.closed and not self.connector.closed:
            self.connector.stir()
            state.hub().call_later(state.world().network.latency(), self.try_to_connect)

    def close(self, linger: float) -> None:
        """Close the connection, because the connecting socket is closed."""
        if self.up is None:
            self.lingers_until = state.hub().now + linger
            self.closed = not (linger and self.queue)
            return
        self.closed = True
        if not linger:
            self.up.cut()
        self.disconnect_when_empty(self.up)

    def give_up(self) -> None:
        """Lose what waits for a connection, because the process is gone."""
        self.closed = True
        self.queue.clear()

    def disconnect_when_empty(self, channel: Channel) -> None:
        """Lose the connection when what has left its sender has arrived."""
        if self.listener is None:
            return
        receiver = channel.receiver
        if channel.in_flight and not (receiver.closed or receiver.process.is_dead):
            wait = RETRY_INTERVAL if receiver.process.is_stopped else 1e-6
            hub = state.hub()
            hub.call_at(max(channel.last_at, hub.now) + wait, self.disconnect_when_empty, channel)
        else:
            self.disconnect()


def _show(frames: Frames) -> str:
    return " ".join(frame[:40].decode("ascii", "replace").replace("\n", " ") for frame in frames)


def _is_there(address: str) -> bool:
    return not address.startswith("ipc://") or os.path.exists(address.removeprefix("ipc://"))
