"""Which of an engine core's connections over a network stand: to its host, and two to each client."""

from __future__ import annotations

import zmq

from nbengine.errors import NBEngineError
from nbengine.ipc.connection_watch import ConnectionWatch
from nbengine.ipc.messages import AttachClient
from nbengine.ipc.transport import bound_address, is_tcp

_CONTROL = "control"


class Connections:
    """For the thread that polls `poller`. On one machine there is nothing to watch, and nothing is done."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        self._context = context
        self._poller = poller
        self._watches: dict[zmq.Socket[bytes], tuple[ConnectionWatch, int | None]] = {}
        """By their sockets, with the client's index; None: the host's."""

    def watch_control(self, control: zmq.Socket[bytes]) -> None:
        """Watch the connection to the host."""
        if is_tcp(bound_address(control)):
            ConnectionWatch.announce(control, _CONTROL)
            self._watch(_CONTROL, None)

    def watch_client(self, client: AttachClient, input_socket: zmq.Socket[bytes]) -> None:
        """Watch the connections to a client; that of the output thread is announced by that thread."""
        if is_tcp(client.input_address):
            name = f"input-{client.client_index}"
            ConnectionWatch.announce(input_socket, name)
            self._watch(name, client.client_index)
            self._watch(output_watch_name(client.client_index), client.client_index)

    def look(self, socket: zmq.Socket[bytes]) -> int | None:
        """Look at a watch whose socket became readable; returns the client to which a connection broke, if so.

        Raises:
            NBEngineError: the connection to the host broke.
        """
        watch, client_index = self._watches.get(socket, (None, None))
        if watch is None or not watch.broke():
            return None
        if client_index is None:
            raise NBEngineError("the connection to the engine's host broke")
        self.forget(client_index)
        return client_index

    def forget(self, client_index: int) -> None:
        """Watch a client no longer."""
        for watch, index in list(self._watches.values()):
            if index == client_index:
                self._poller.unregister(watch.socket)
                del self._watches[watch.socket]
                watch.close()

    def close(self) -> None:
        """Watch nothing any more."""
        for watch, _ in self._watches.values():
            watch.close()
        self._watches.clear()

    def _watch(self, name: str, client_index: int | None) -> None:
        watch = ConnectionWatch(self._context, name)
        self._watches[watch.socket] = (watch, client_index)
        self._poller.register(watch.socket, zmq.POLLIN)


def output_watch_name(client_index: int) -> str:
    """Name of the watch on the socket that takes outputs to a client."""
    return f"output-{client_index}"
