"""A process that has no descriptors left when a peer connects lives on, and takes the peer in later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import zmq

LISTENER = """
import os, resource, sys
import zmq
from nbengine.ipc.doorkeeper import Doorkeeper
from nbengine.ipc.sockets import make_socket
context = zmq.Context()
socket = make_socket(context, sys.argv[1], zmq.PULL, bind=True)
door = Doorkeeper([sys.argv[1]])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
print(door.look(), flush=True)
sys.stdin.readline()
for descriptor in held:
    os.close(descriptor)
print(door.look(), flush=True)
print(socket.recv().decode(), flush=True)
door.close()
socket.close()
context.term()
"""


def test_a_peer_that_comes_at_a_shortage_is_kept_outside_and_let_in_later(tmp_path: Path) -> None:
    path = tmp_path / "in"
    address = f"ipc://{path}"
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
        assert process.stdout.readline() == "False\n"
        # What a connection to it would do then: libzmq would end the process.
        monitor = peer.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECTED)
        peer.connect(address)
        peer.send(b"let me in")
        for _ in range(2):
            assert monitor.poll(60_000)
            monitor.recv_multipart()
        assert process.poll() is None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
        assert process.stdout.readline() == "let me in\n"
        peer.disable_monitor()
        monitor.close()
    process.communicate(timeout=100)
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == [path]
