"""A bridge ends with its owner, also where others hold the line."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection

import pytest


def test_a_bridge_sees_the_end_of_its_owner_though_the_line_is_held_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ray takes seconds to import, in every process that collects this.
    bridge = pytest.importorskip("nbengine.cluster.bridge", exc_type=ImportError)
    monkeypatch.setattr(bridge, "OWNER_SECONDS", 0.01)
    parents = [1234]
    monkeypatch.setattr("nbengine.cluster.bridge.os.getppid", lambda: parents[-1])
    theirs, ours = socket.socketpair()
    connection = Connection(theirs.detach())
    serving = threading.Thread(target=bridge.Bridge(connection).run, daemon=True)
    serving.start()
    serving.join(0.05)
    assert serving.is_alive()
    parents.append(1)
    serving.join(60)
    assert not serving.is_alive()
    connection.close()
    ours.close()
