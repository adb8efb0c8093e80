"""The last way for a client to end an engine: signals,
when its host does not hear or the client's link is gone."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

import zmq

from nbengine.client.engines.launch import bury_child
from nbengine.client.engines.processes import kill_session, wait_until
from nbengine.client.link.engine_watch import EngineWatch
from nbengine.client.link.host_connection import HostConnection
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import Shutdown
from nbengine.ipc.shortage import RESERVE, DescriptorReserve, Setbacks, check_room, persist
from nbengine.runtime.connection import ConnectionInfo, remove_engine_files

logger = logging.getLogger(__name__)

CLEAR_TIMEOUT = 60.0
"""Seconds for which the removal of an engine's remains is tried again while descriptors are short.

Strangers at this client's ports are cut off after a handshake's time, one backlog after the other.
"""
CONNECT_LINGER_MS = 2000
"""Milliseconds that the last request to a host on another machine may be on its way."""


class EngineEnd:
    """The way to make an engine end and to leave nothing of it on this machine.

    The decisive steps, to ask the host and to kill it, need no new descriptor; its cores end with it. A few
    descriptors are kept back to clear away the remains.
    """

    def __init__(self, info: ConnectionInfo, watch: EngineWatch) -> None:
        self._info = info
        self._watch = watch
        self._reserve = DescriptorReserve()
        self._clearing = threading.Lock()
        """The link's thread and one that shuts the engine down may both clear it away."""
        self._setbacks = Setbacks(logger, f"what is left of engine {info.name} cannot be removed")

    def ask(self) -> None:
        """Have the host end the engine; do not wait.

        This has no effect on another machine than the engine's.
        """
        self._watch.signal_host(signal.SIGTERM)

    def force(self, patience: float) -> None:
        """Ask the host, give it `patience` seconds to end the engine in order, and then kill what is left."""
        if not self._info.is_here:
            self._ask_from_afar()
            return
        self.ask()
        if not self.wait(patience):
            self._watch.signal_host(signal.SIGKILL)
        self.clear(grace=0.0)

    def wait(self, timeout: float) -> bool:
        """Wait until the host has ended; return False if it still runs after `timeout` seconds."""
        return wait_until(self._watch.host_gone, timeout)

    def clear(self, grace: float) -> None:
        """Kill the engine's processes that still run after `grace` seconds, and remove its files."""
        with self._clearing:
            self._reserve.give_back()
            if not persist(lambda: self._clear(grace), self._setbacks, CLEAR_TIMEOUT):
                logger.error(
                    "something of engine %s may be left: `nbengine reap` removes it", self._info.name
                )
            # This needs no descriptor.
            bury_child(self._info.run_dir)
            self._reserve.renew()

    def close(self) -> None:
        """Give the descriptors back."""
        self._reserve.give_back()

    def _clear(self, grace: float) -> None:
        # The removal of directories reports no failure, so the descriptors that it needs are checked before.
        check_room(RESERVE)
        killed = kill_session(self._info, grace)
        if killed:
            logger.warning("killed what was left of engine %s: pids %s", self._info.name, killed)
        remove_engine_files(self._info)

    def _ask_from_afar(self) -> None:
        with contextlib.suppress(NBEngineError):
            connection = HostConnection(self._info, zmq.Poller(), linger=CONNECT_LINGER_MS)
            connection.send(Shutdown())
            connection.close()
