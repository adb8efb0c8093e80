"""A watch over the connection that a socket makes over a network.

Messages that are on their way when it breaks may be lost, and nobody is told which: a process that needs all
of them starts again.
"""

from __future__ import annotations

import zmq

from nbengine.ipc.monitor_events import receive_event

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class ConnectionWatch:
    """A watch on a socket that connects to one address;
    it is not for one that listens, where strangers connect.

    The watched socket may belong to another thread, which calls `announce` and, before it closes the socket,
    `withdraw`. Only then may the watch be closed: ZeroMQ's own thread waits for a reader of its news.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        """A socket that is readable when `read` has something new."""
        self.socket.linger = 0
        self.socket.connect(_address(name))
        self.ended = False
        """The watch has ended: nothing more will come."""

    @staticmethod
    def announce(watched: zmq.Socket[bytes], name: str) -> None:
        """Have the events of `watched` sent to the watch called `name`, which exists already."""
        watched.monitor(_address(name), _EVENTS)

    @staticmethod
    def withdraw(watched: zmq.Socket[bytes]) -> None:
        """Stop sending events; this has no effect on a socket that was not announced."""
        watched.disable_monitor()

    def read(self) -> list[bool]:
        """Return what has happened since the last call, in order:
        a connection was made (True) or broke (False)."""
        news = []
        while self.socket.poll(0):
            event = receive_event(self.socket).event
            if event == zmq.EVENT_MONITOR_STOPPED:
                self.ended = True
            else:
                news.append(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return news

    def close(self) -> None:
        """Stop watching."""
        self.socket.close()


def _address(name: str) -> str:
    return f"inproc://watch-{name}"
