"""The sockets that an engine's host binds, for clients, engine cores and whoever follows the engine."""

from __future__ import annotations

import resource

import zmq

from nbengine.client.connection import ConnectionInfo
from nbengine.engine.coordinator import DPCoordinatorProc
from nbengine.ipc.control_messages import EngineHandshakeMetadata
from nbengine.ipc.curve import SocketOptions
from nbengine.ipc.sockets import MAX_CONTROL_BYTES, make_socket
from nbengine.ipc.transport import bound_address

COORDINATOR_SOCKETS = ("stats.sock", "back-out.sock", "back-pub.sock")
MAX_OPEN_FILES = 65536


class HostSockets:
    """Binds everything at once; where on a network that is, it notes in `info`."""

    def __init__(self, info: ConnectionInfo) -> None:
        if info.keys is not None:
            _raise_file_limit()
        self.context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
        bound: dict[str, zmq.Socket[bytes]] = {}
        try:
            for name in ("host.sock", "core.sock"):
                bound[name] = self._bind_router(info.host_bind_address(name))
            self.coordinator = DPCoordinatorProc(
                self.context,
                info.config.parallel.data_parallel_size,
                info.host_bind_address("stats.sock"),
                info.host_bind_address("back-out.sock"),
                info.host_bind_address("back-pub.sock"),
                lock_step=info.config.lock_step,
            )
        except BaseException:
            self.context.destroy(linger=0)
            raise
        self.clients, self.cores = bound["host.sock"], bound["core.sock"]
        coordinator = self.coordinator
        ends = (coordinator.publish_front, coordinator.output_back, coordinator.publish_back)
        bound |= zip(COORDINATOR_SOCKETS, ends, strict=True)
        if info.keys is not None:
            info.addresses = {name: bound_address(socket) for name, socket in bound.items()}

    def _bind_router(self, address: str) -> zmq.Socket[bytes]:
        # A peer that comes back after its connection broke takes its place, though the old one is not gone yet.
        options: SocketOptions = {zmq.ROUTER_HANDOVER: 1}
        return make_socket(
            self.context,
            address,
            zmq.ROUTER,
            bind=True,
            max_frame_bytes=MAX_CONTROL_BYTES,
            options=options,
        )


def _raise_file_limit() -> None:
    """Make room for the connections of strangers, each of which is an open file until it is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def handshake_of(info: ConnectionInfo) -> EngineHandshakeMetadata:
    """What the host tells every engine core."""
    # A client or a core on another machine has no such directory.
    tensor_dir = info.tensor_dir if info.keys is None else ""
    return EngineHandshakeMetadata(info.address("back-pub.sock"), info.address("back-out.sock"), tensor_dir)
