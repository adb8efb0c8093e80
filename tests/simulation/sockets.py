"""ZeroMQ's contexts and sockets."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq
from greenlet import GreenletExit

from tests.simulation import state
from tests.simulation.network import Again, Frames, Link, Tracker
from tests.simulation.polling import SimPoller, Source

if TYPE_CHECKING:
    from tests.simulation.processes import Process


LINGER_INTERVAL = 0.005


_SUBSCRIBERS = (zmq.SUB, zmq.XSUB)


_NOBLOCK, _INPUT = int(zmq.NOBLOCK), int(zmq.POLLIN)
"""To look for it in a flag of the enumeration takes twenty times as long."""


def _no_descriptor() -> zmq.ZMQError:
    return zmq.ZMQError(errno.EMFILE)


class SimContext:
    """`EngineContext`, for engines of one machine."""

    def __init__(self) -> None:
        self.process = state.process()
        self.sockets: list[SimSocket] = []
        self.inproc: dict[str, SimSocket] = {}
        self.lingering: list[tuple[Link, float]] = []
        """Connections of closed sockets that have something to send, and until when they may."""
        self.process.contexts.append(self)

    @classmethod
    def with_keys(cls, keys: object, patience: float = 0.0) -> SimContext:
        return cls()

    def socket(self, kind: int) -> SimSocket:
        self.process.outside("socket", opens=1, error=_no_descriptor)
        return SimSocket(self, kind)

    def term(self) -> None:
        hub = state.hub()
        if self.sockets:
            names = ", ".join(map(repr, self.sockets))
            hub.fail(
                f"{self.process.role} terminates a context with open sockets, and waits for ever: {names}"
            )
        while any(link.holds_something and hub.now < until for link, until in self.lingering):
            hub.sleep(LINGER_INTERVAL)

    def destroy(self, linger: int | None = None) -> None:
        for socket in list(self.sockets):
            socket.close(linger)
        self.term()


class SimSocket(Source):
    """`zmq.Socket`."""

    def __init__(self, context: SimContext, kind: int) -> None:
        super().__init__()
        self.context = context
        self.process: Process = context.process
        self._world = self.process.world
        self.kind = kind
        self.number = next(self._world.network.numbers)
        self.identity = b""
        self.linger = -1
        self.sndhwm = self.rcvhwm = 1000
        self.maxmsgsize = -1
        self.options: dict[int, Any] = {}
        self.topics: list[bytes] = []
        self.closed = False
        self.inbox: deque[Frames] = deque()
        self.peers: dict[bytes, Link] = {}
        """Of a ROUTER, by identity."""
        self.links: list[Link] = []
        """The connections of a socket that binds, or the only one of a socket that connects."""
        self.partner: SimSocket | None = None
        """Of a PAIR."""
        self.subscriptions: dict[Link, set[bytes]] = {}
        self.address = ""
        self._turn = 0
        self._descriptor: Descriptor | None = None
        context.sockets.append(self)
        self.process.free_files -= 1
        self._world.network.open_sockets[self.number] = self

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        kind = zmq.SocketType(self.kind).name
        return f"<{kind} {self.process.role} {self.address.rpartition('/')[2]}>"

    # Options.

    def set_hwm(self, value: int) -> None:
        self.sndhwm = self.rcvhwm = value

    @property
    def routing_id(self) -> bytes:
        return self.identity

    @routing_id.setter
    def routing_id(self, value: bytes) -> None:
        self.identity = value

    def set(self, option: int, value: Any) -> None:
        if option == zmq.SUBSCRIBE:
            self._subscribe(value)
        else:
            self.options[option] = value

    setsockopt = set

    def get_string(self, option: int) -> str:
        return self.address if option == zmq.LAST_ENDPOINT else ""

    def disable_monitor(self) -> None:
        """Do nothing, since there are no connections over a network here."""

    def fileno(self) -> int:
        if self._descriptor is None:
            self._descriptor = Descriptor(self)
            self.process.open_number(self._descriptor)
        return self._descriptor.number

    # Connections.

    def bind(self, address: str) -> None:
        if address.startswith("inproc://"):
            self.context.inproc[address] = self
        else:
            self.process.outside("bind", opens=1, error=_no_descriptor)
            network = state.world().network
            try:
                os.close(os.open(address.removeprefix("ipc://"), os.O_CREAT | os.O_WRONLY, 0o600))
            except OSError as error:
                raise zmq.ZMQError(error.errno) from error
            network.listeners[address] = self
            network.name_is_back(address)
        self.address = address

    def connect(self, address: str) -> None:
        self.address = address
        if address.startswith("inproc://"):
            other = self.context.inproc[address]
            self.partner, other.partner = other, self
            return
        link = Link(self, address)
        self.links.append(link)
        state.hub().call_later(state.world().network.latency(), link.try_to_connect)

    def close(self, linger: int | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        milliseconds = self.linger if linger is None else linger
        # Without a bound it lasts until everything is sent, which nobody here asks for.
        seconds = 60.0 if milliseconds < 0 else milliseconds / 1000
        self._forget()
        hub = state.hub()
        if self.address in self.context.inproc or self.kind == zmq.PAIR:
            return
        for link in list(self.links):
            if link.connector is self:
                if seconds and link.num_queued:
                    self.context.lingering.append((link, hub.now + seconds))
                link.close(seconds)
            elif link.down is not None:
                if seconds == 0:
                    link.down.cut()
                elif link.down.in_flight:
                    self.context.lingering.append((link, hub.now + seconds))
                link.disconnect_when_empty(link.down)
        network = state.world().network
        if network.listeners.get(self.address) is self:
            del network.listeners[self.address]

    def die(self) -> None:
        """Close the socket, because the process is gone."""
        if self.closed:
            return
        self.closed = True
        self._forget()
        network = state.world().network
        if network.listeners.get(self.address) is self:
            del network.listeners[self.address]
        for link in list(self.links):
            channel = link.up if link.connector is self else link.down
            if link.connector is self:
                link.closed = True
            if channel is not None:
                channel.cut()
                link.disconnect_when_empty(channel)

    def _forget(self) -> None:
        if self in self.context.sockets:
            self.context.sockets.remove(self)
            self.process.free_files += 1
        state.world().network.open_sockets.pop(self.number, None)
        if self._descriptor is not None:
            self.process.close_number(self._descriptor.number)
        self.inbox.clear()

    # Messages.

    def send(self, data: Any, flags: int = 0, copy: bool = True, track: bool = False) -> Tracker | None:
        return self.send_multipart((data,), flags, copy, track)

    def send_multipart(
        self, frames: Sequence[Any], flags: int = 0, copy: bool = True, track: bool = False
    ) -> Tracker | None:
        self._use()
        message = tuple([frame if type(frame) is bytes else bytes(frame) for frame in frames])
        tracker = Tracker() if track else None
        world = self._world
        if self.kind == zmq.ROUTER:
            link = self.peers.get(message[0])
            if link is not None and link.down is not None:
                link.down.send(message[1:], tracker)
            elif tracker is not None:
                tracker.done = True
        elif self.kind == zmq.PAIR:
            while self.partner is None:
                if int(flags) & _NOBLOCK:
                    raise Again
                world.hub.sleep(0.001)
            world.hub.call_later(world.hub.delay, self.partner.take, message)
        elif self.kind == zmq.XPUB:
            self._publish(message)
        elif self.kind == zmq.XSUB and message[0][:1] == b"\x01" and len(message) == 1:
            self._subscribe(message[0][1:])
        else:
            (link,) = self.links
            while not self.writable():
                if int(flags) & _NOBLOCK:
                    raise Again
                world.hub.sleep(0.001)
            link.send(message, tracker)
        if world.hub.preemption:
            world.hub.maybe_preempt()
        return tracker

    def recv(self, flags: int = 0) -> bytes:
        (frame,) = self.recv_multipart(flags)
        return frame

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        self._use()
        if not self.inbox:
            if int(flags) & _NOBLOCK:
                raise Again
            poller = SimPoller()
            poller.register(self, zmq.POLLIN)
            while not self.inbox:
                poller.poll()
            poller.unregister(self)
        frames = self.inbox.popleft()
        hub = self._world.hub
        if hub.preemption:
            hub.maybe_preempt()
        return list(frames) if copy else [zmq.Frame(frame) for frame in frames]

    def poll(self, timeout: float | None = None, flags: int = zmq.POLLIN) -> int:
        self._use()
        if self.inbox and flags == _INPUT:
            hub = self._world.hub
            if hub.preemption:
                hub.maybe_preempt()
            return _INPUT
        poller = SimPoller()
        poller.register(self, flags)
        found = poller.poll(timeout)
        poller.unregister(self)
        return found[0][1] if found else 0

    def take(self, frames: Frames) -> None:
        """Take a message that has arrived."""
        if self.closed:
            return
        if self.kind == zmq.XPUB and len(frames) == 1 and frames[0][:1] in (b"\0", b"\1"):
            self._on_subscription(frames[0])
            return
        if self.kind in _SUBSCRIBERS and 0 < self.rcvhwm <= len(self.inbox):
            return
        self.inbox.append(frames)
        self.stir()

    def lose(self, link: Link) -> None:
        """Lose a connection to this socket."""
        if self.kind == zmq.XPUB and not self.closed:
            for topic in sorted(self.subscriptions.pop(link, ())):
                if not any(topic in topics for topics in self.subscriptions.values()):
                    self.inbox.append((b"\0" + topic,))

    def readable(self) -> bool:
        return bool(self.inbox)

    def writable(self) -> bool:
        if self.kind in (zmq.PUSH, zmq.DEALER) and self.sndhwm:
            for link in self.links:
                if link.num_queued >= self.sndhwm:
                    return False
        return True

    def stir(self) -> None:
        """Let the descriptor tell that something has happened to this socket."""
        if self._descriptor is not None:
            self._descriptor.signal()
        self.changed()

    def _use(self) -> None:
        """Look what has happened, as every call does, so that the descriptor has nothing more to tell."""
        if self.process.is_dead or self._world.over:
            raise GreenletExit
        if self.closed:
            raise zmq.ZMQError(errno.ENOTSOCK)
        if self._descriptor is not None:
            self._descriptor.signaled = False

    # Subscriptions. A `Link` stands for its subscriber.

    def _subscribe(self, topic: bytes) -> None:
        self.topics.append(topic)
        for link in self.links:
            if link.up is not None:
                link.up.send((b"\x01" + topic,))

    def _on_subscription(self, frame: bytes) -> None:
        # Whose it is matters only for what is sent there: every subscriber here wants its topics for good.
        topic = frame[1:]
        for link in self.links:
            if topic in link.connector.topics:
                self.subscriptions.setdefault(link, set()).add(topic)
        self.inbox.append((frame,))
        self.stir()

    def _publish(self, message: Frames) -> None:
        for link in self.links:
            wanted = self.subscriptions.get(link)
            if wanted and link.down is not None and any(message[0].startswith(topic) for topic in wanted):
                link.down.send(message)


class Descriptor(Source):
    """The descriptor of a ZeroMQ socket: it tells that something has happened, once."""

    def __init__(self, socket: SimSocket) -> None:
        super().__init__()
        self.socket = socket
        self.signaled = False
        self.number = -1

    def readable(self) -> bool:
        return self.signaled

    def signal(self) -> None:
        """Note that something has happened."""
        self.signaled = True
        self.changed()

    def close(self) -> None:
        """Do nothing, since nothing is behind it but the socket."""
