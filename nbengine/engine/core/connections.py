"""The watch over an engine core's connections on a network: to its host, and two to each client."""

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
    """None for a connection to the host."""
    socket: zmq.Socket[bytes] | None
    """The socket that is watched; None if it is a socket of the output thread."""
    matters: bool = True


class Connections:
    """The watches of an engine core, for the thread that polls `poller`; there are none on one machine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        self._context = context
        self._poller = poller
        self._watched: dict[zmq.Socket[bytes], _Watched] = {}
        """The watched connections, by the sockets of their watches."""

    def watch_host(self, control: zmq.Socket[bytes], waves: zmq.Socket[bytes] | None) -> None:
        """Watch the connection to the host, and in lock step the one that announces waves."""
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
        """Look at a watch whose socket became readable; return the client whose connection broke, else None.

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
        """Stop watching a client's connections."""
        for watched in list(self._watched.values()):
            if watched.client_index == client_index:
                watched.matters = False
                self._withdraw(watched)

    def cancel(self, client_index: int) -> None:
        """Undo what `watch_outputs` and `watch_inputs` have done for a client that is not attached now."""
        for watched in list(self._watched.values()):
            if watched.client_index == client_index:
                self._withdraw(watched)
                self._end(watched)

    def stop(self) -> None:
        """Stop watching this thread's sockets."""
        for watched in list(self._watched.values()):
            self._withdraw(watched)

    def close(self) -> None:
        """Close the remaining watches, after the output thread has ended."""
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
    """Return the name of the watch on the socket that takes outputs to a client."""
    return f"output-{client_index}"
