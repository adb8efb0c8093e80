"""The port at which a host answers Prometheus, on this machine's loopback only."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from nbengine.errors import EngineStartError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from nbengine.engine.host.coordinator import DPCoordinator
    from nbengine.runtime.connection import ConnectionInfo

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PATH = "/metrics"
MOST_CONNECTIONS = 8
"""Connections that are answered at a time; others wait in the system's queue, which is bounded, too."""
PATIENCE = 5.0
"""Seconds that a connection may be silent."""
REST = 1.0
"""Seconds until the next connection is looked for after there was no descriptor or thread for one."""


class MetricsServer:
    """A server of `GET /metrics` on threads of its own: the host's poll loop never waits for who asks.

    Args:
        port: 0 takes any free one.
        collector: asked on those threads.

    Raises:
        EngineStartError: the port cannot be bound.
    """

    def __init__(self, port: int, collector: Collector) -> None:
        try:
            self._server = _Server(port, collector)
        except OSError as error:
            raise EngineStartError(
                f"metrics_port={port} cannot be used at {LOOPBACK} ({error.strerror or error}): choose another "
                "one, or 0 for any that is free"
            ) from None
        self._thread = threading.Thread(target=self._server.run, name="nbengine-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the address to be entered in a browser, or in Prometheus' configuration."""
        return f"http://{LOOPBACK}:{self._server.server_address[1]}{PATH}"

    def close(self) -> None:
        """Free the port and end the thread; who is being answered may lose the end of the answer."""
        self._server.stop()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, collector: Collector) -> None:
        self.collector = collector
        self._slots = threading.Semaphore(MOST_CONNECTIONS)
        self._stopped = False
        super().__init__((LOOPBACK, port), _Handler)

    def run(self) -> None:
        """Answer until `stop`. Nothing is polled, so that an idle engine stays asleep."""
        while not self._stopped:
            self._slots.acquire()
            try:
                request, address = self.get_request()
                self.process_request(request, address)
            except (OSError, RuntimeError) as error:
                self._slots.release()
                if not self._stopped:
                    self._rest_after(error)
        self.server_close()

    def _rest_after(self, error: Exception) -> None:
        # A connection that broke before it was accepted is the business of its other end.
        if not isinstance(error, ConnectionError):
            logger.warning("the metrics port falters: %s", error)
            time.sleep(REST)

    def stop(self) -> None:
        """End `run`, which waits for a connection or for the end of one."""
        self._stopped = True
        # It fails where the system has no way to wake who waits for a connection but to close the socket.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._slots.release()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection on a thread of its own."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log what went wrong with a connection, which is over."""
        logger.warning("a request for the metrics failed", exc_info=True)  # noqa: LOG014 (socketserver calls it while it handles the exception)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE
    server_version = "nbengine"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the metrics."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with the headers of the metrics."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        from nbengine.metrics.exposition import exposition

        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"the metrics are at {PATH}")
            return
        body, content_type = exposition(self.server.collector, self.headers.get("Accept", ""))
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request where somebody looks for every detail."""
        logger.debug(format, *args)


def serve_metrics(info: ConnectionInfo, port: int, coordinator: DPCoordinator) -> MetricsServer:
    """Serve the metrics of an engine, and note where in `info`.

    Raises:
        EngineStartError: the port cannot be bound, or prometheus_client is not installed.
    """
    try:
        from nbengine.metrics.exposition import EngineCollector
    except ImportError as error:
        raise EngineStartError(
            f"metrics_port={port} needs prometheus-client: pip install nbengine[metrics] ({error})"
        ) from None
    server = MetricsServer(
        port, EngineCollector(lambda: coordinator.snapshot(time.time()), info.config.model.model)
    )
    info.metrics_address = server.address
    logger.info("metrics for Prometheus at %s", server.address)
    return server
