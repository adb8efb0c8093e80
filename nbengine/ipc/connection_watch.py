"""Whether the connection that a socket makes over a network stands.

What was on its way when one breaks may be lost, and nobody is told which messages those were: who needs all of them
starts anew.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ConnectionWatch:
    """Follows a socket that connects to one address; not for one that listens, to which strangers connect, too.

    The watched socket may belong to another thread: `announce` is to be called on that one, under the same name.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        """Readable when `read` has something new."""
        self.socket.linger = 0
        self.socket.connect(_address(name))

    @staticmethod
    def announce(watched: zmq.Socket[bytes], name: str) -> None:
        """Have what happens to `watched` told to the watch called `name`; before or after that is made."""
        watched.monitor(_address(name), _EVENTS)

    def read(self) -> list[bool]:
        """What has happened since the last call, in order: a connection was made (True) or broke (False)."""
        news = []
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket)["event"]
            if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED):
                news.append(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return news

    def broke(self) -> bool:
        """Whether a connection broke since the last call."""
        return not all(self.read())

    def close(self) -> None:
        """Stop watching."""
        self.socket.close()


def _address(name: str) -> str:
    return f"inproc://watch-{name}"
