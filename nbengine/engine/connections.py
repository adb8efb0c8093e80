"""Which of an engine core's connections over a network stand: to its host, and two to each client."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from nbengine.errors import NBEngineError
from nbengine.ipc.connection_watch import ConnectionWatch
from nbengine.ipc.control_messages import AttachClient
from nbengine.ipc.transport import bound_address, is_tcp


@dataclass(slots=True)
class _Watched:
    watch: ConnectionWatch
    client_index: int | None
    """None: it is a connection to the host."""
    socket: zmq.Socket[bytes] | None
    """What is watched; None: a socket of the output thread's."""
    matters: bool = True


class Connections:
    """For the thread that polls `poller`. On one machine there is nothing to watch, and nothing is done."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        self._context = context
        self._poller = poller
        self._watched: dict[zmq.Socket[bytes], _Watched] = {}
        """By the watches' sockets."""

    def watch_host(self, control: zmq.Socket[bytes], waves: zmq.Socket[bytes] | None) -> None:
        """Watch the connection to the host, and in lock step the one by which waves begin."""
        for name, socket in (("control", control), ("waves", waves)):
            if socket is not None and is_tcp(bound_address(socket)):
                self._watch(name, None, socket)

    def watch_outputs(self, client: AttachClient) -> None:
        """Watch the output thread's connection to a client, before that thread makes it."""
        if is_tcp(client.output_address):
            self._watch(output_watch_name(client.client_index), client.client_index, None)

    def watch_inputs(self, client: AttachClient, socket: zmq.Socket[bytes]) -> None:
        """Watch this thread's connection to a client."""
        if is_tcp(client.input_address):
            self._watch(f"input-{client.client_index}", client.client_index, socket)

    def look(self, socket: zmq.Socket[bytes]) -> int | None:
        """Look at a watch whose socket became readable; returns the client to which a connection broke, if so.

        Raises:
            NBEngineError: the connection to the host broke.
        """
        watched = self._watched.get(socket)
        if watched is None:
            return None
        stood = all(watched.watch.read())
        matters, client_index = watched.matters, watched.client_index
        if watched.watch.ended:
            self._end(watched)
        if stood or not matters:
            return None
        if client_index is None:
            raise NBEngineError("the connection to the engine's host broke")
        self.forget(client_index)
        return client_index

    def forget(self, client_index: int) -> None:
        """Watch a client no longer."""
        for watched in list(self._watched.values()):
            if watched.client_index == client_index:
                watched.matters = False
                self._withdraw(watched)

    def stop(self) -> None:
        """Watch this thread's sockets no longer."""
        for watched in list(self._watched.values()):
            self._withdraw(watched)

    def close(self) -> None:
        """Close what is left; the output thread has ended."""
        for watched in self._watched.values():
            watched.watch.close()
        self._watched.clear()

    def _watch(self, name: str, client_index: int | None, socket: zmq.Socket[bytes] | None) -> None:
        watch = ConnectionWatch(self._context, name)
        self._watched[watch.socket] = _Watched(watch, client_index, socket)
        self._poller.register(watch.socket, zmq.POLLIN)
        if socket is not None:
            ConnectionWatch.announce(socket, name)

    def _withdraw(self, watched: _Watched) -> None:
        if watched.socket is not None:
            ConnectionWatch.withdraw(watched.socket)
            self._end(watched)

    def _end(self, watched: _Watched) -> None:
        socket = watched.watch.socket
        if self._watched.pop(socket, None) is not None:
            self._poller.unregister(socket)
            watched.watch.close()


def output_watch_name(client_index: int) -> str:
    """Name of the watch on the socket that takes outputs to a client."""
    return f"output-{client_index}"
