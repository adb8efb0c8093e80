"""The sockets that an engine's host binds, for clients, engine cores and those who follow the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

from nbengine.engine.host.coordinator import DPCoordinator, DPCoordinatorProc
from nbengine.ipc.control_messages import EngineHandshakeMetadata
from nbengine.ipc.curve import SocketOptions
from nbengine.ipc.protocol import PROTOCOL
from nbengine.ipc.sockets import MAX_CLIENT_BYTES, MAX_CONTROL_BYTES, make_socket
from nbengine.ipc.transport import bound_address
from nbengine.runtime.connection import ConnectionInfo

if TYPE_CHECKING:
    from nbengine.engine.host.metrics_server import MetricsServer

COORDINATOR_SOCKETS = ("stats.sock", "back-out.sock", "back-pub.sock")
PEER_HWM = 64
"""Most control messages of one peer that wait to be read here; later ones wait on its side."""
CLIENT_HWM = 10_000
"""Most control messages kept for a client that does not read; later ones are dropped."""


class HostSockets:
    """The host's sockets, all bound at once; on a network, their addresses are noted in `info`."""

    def __init__(self, info: ConnectionInfo) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
        bound: dict[str, zmq.Socket[bytes]] = {}
        try:
            clients, cores = info.host_bind_address("host.sock"), info.host_bind_address("core.sock")
            bound["host.sock"] = self._bind_router(clients, MAX_CLIENT_BYTES, CLIENT_HWM)
            # Unlimited, because messages to an engine core must not be dropped.
            bound["core.sock"] = self._bind_router(cores, MAX_CONTROL_BYTES, send_hwm=0)
            self.coordinator = DPCoordinatorProc(
                self.context,
                info.config.parallel.data_parallel_size,
                info.host_bind_address("stats.sock"),
                info.host_bind_address("back-out.sock"),
                info.host_bind_address("back-pub.sock"),
                lock_step=info.config.lock_step,
            )
            self.metrics = _serve_metrics(info, self.coordinator.state)
        except BaseException:
            self.context.destroy(linger=0)
            raise
        self.clients, self.cores = bound["host.sock"], bound["core.sock"]
        coordinator = self.coordinator
        ends = (coordinator.publish_front, coordinator.output_back, coordinator.publish_back)
        bound |= zip(COORDINATOR_SOCKETS, ends, strict=True)
        if info.keys is not None:
            info.addresses = {name: bound_address(socket) for name, socket in bound.items()}

    def _bind_router(self, address: str, max_frame_bytes: int, send_hwm: int) -> zmq.Socket[bytes]:
        # A peer that comes back after its connection broke takes its old place, which may not be free yet.
        options: SocketOptions = {zmq.ROUTER_HANDOVER: 1}
        return make_socket(
            self.context,
            address,
            zmq.ROUTER,
            bind=True,
            send_hwm=send_hwm,
            receive_hwm=PEER_HWM,
            max_frame_bytes=max_frame_bytes,
            options=options,
        )


def _serve_metrics(info: ConnectionInfo, coordinator: DPCoordinator) -> MetricsServer | None:
    if info.config.metrics_port is None:
        return None
    # An HTTP server and its library take 4 MB and 35 ms, which most hosts can do without.
    from nbengine.engine.host.metrics_server import serve_metrics

    return serve_metrics(info, info.config.metrics_port, coordinator)


def handshake_of(info: ConnectionInfo) -> EngineHandshakeMetadata:
    """Make the message with which the host answers every engine core's Hello."""
    # A client or a core on another machine cannot use a directory of this one.
    tensor_dir = info.tensor_dir if info.keys is None else ""
    return EngineHandshakeMetadata(
        info.address("back-pub.sock"), info.address("back-out.sock"), tensor_dir, protocol=PROTOCOL
    )
