"""Whether the connection that a socket makes over a network stands.

What was on its way when one breaks may be lost, and nobody is told which messages those were: who needs all of them
starts anew.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class ConnectionWatch:
    """Follows a socket that connects to one address; not for one that listens, to which strangers connect, too.

    The watched socket may belong to another thread, which calls `announce` and, before it closes the socket,
    `withdraw`. Only then may the watch be closed: ZeroMQ's own thread waits for a reader of its news.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        """Readable when `read` has something new."""
        self.socket.linger = 0
        self.socket.connect(_address(name))
        self.ended = False
        """Nothing more will come."""

    @staticmethod
    def announce(watched: zmq.Socket[bytes], name: str) -> None:
        """Have what happens to `watched` told to the watch called `name`, which is there already."""
        watched.monitor(_address(name), _EVENTS)

    @staticmethod
    def withdraw(watched: zmq.Socket[bytes]) -> None:
        """Have nothing told any more; of no effect on a socket that was not announced."""
        watched.disable_monitor()

    def read(self) -> list[bool]:
        """What has happened since the last call, in order: a connection was made (True) or broke (False)."""
        news = []
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket)["event"]
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
