"""A stranger without a key of the engine's, or with a wrong one, gets nowhere, and the engine goes on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from process_support.engine_under_test import EngineUnderTest, wait_for
from process_support.raw_client import RawClient

from nbengine import LLM, SamplingParams
from nbengine.client.engines.processes import session_processes
from nbengine.client.mp import MPClient
from nbengine.ipc.control_messages import Shutdown
from nbengine.ipc.curve import CurveKeys, make_curve_keys
from nbengine.ipc.handshake import encode_control
from nbengine.ipc.shortage import check_room
from nbengine.ipc.transport import HANDSHAKE_MS, EngineContext, host_of
from nbengine.runtime.connection import connection_file, engine_file
from tests.support.thorough import amount

StartEngine = Callable[..., EngineUnderTest]

NUM_HALF_OPEN = amount(600, thorough=2000)
ROOM = 160
"""Files that a client of which strangers want to use up all may open besides those it has."""
CROWD = """
import resource, selectors, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
selector = selectors.DefaultSelector()
def enter(port):
    end = socket.socket()
    end.setblocking(False)
    end.connect_ex(("127.0.0.1", port))
    selector.register(end, selectors.EVENT_READ, port)
for port in sys.argv[2:]:
    for _ in range(int(sys.argv[1])):
        enter(int(port))
print("here", flush=True)
while True:
    for key, _ in selector.select():
        try:
            stays = key.fileobj.recv(1000) != b""
        except OSError:
            stays = False
        if not stays:
            # A stranger that is cut off comes again.
            selector.unregister(key.fileobj)
            key.fileobj.close()
            enter(key.data)
    # All at once, and a hundred times a second: the machine has other tests to run.
    time.sleep(0.01)
"""
FEW_FILES = 256
"""Less than half of the connections."""
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@pytest.fixture
def engine(start_networked: StartEngine) -> EngineUnderTest:
    return start_networked()


@pytest.fixture
def client(engine: EngineUnderTest) -> RawClient:
    return engine.client().attach()


def assert_goes_on(client: RawClient, name: str) -> None:
    """Check that requests are answered, and that the host takes clients."""
    client.add(name, [1])
    client.wait_finished(name)
    assert client.tokens(name) == list(range(2, 10))


def all_addresses(client: RawClient) -> list[str]:
    """Everything that listens: the host's sockets and a client's."""
    return [*client.info.addresses.values(), client.input_address, client.output_address]


def connected(address: str) -> socket.socket:
    port = int(address.rpartition(":")[2])
    return socket.create_connection((host_of(address), port), timeout=10)


def test_an_engine_on_a_network_listens_on_its_address_alone(client: RawClient) -> None:
    names = {"host.sock", "core.sock", "stats.sock", "back-out.sock", "back-pub.sock"}
    assert set(client.info.addresses) == names
    assert all(address.startswith("tcp://127.0.0.1:") for address in all_addresses(client))
    processes = [psutil.Process(), psutil.Process(client.info.host_pid)]
    ours = {int(address.rpartition(":")[2]) for address in all_addresses(client)}
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {(ip, port) for ip, port in listening if port in ours} == {("127.0.0.1", port) for port in ours}


def test_an_engine_of_one_machine_listens_on_no_port(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.client().attach()
    processes = engine.processes()
    assert len(processes) == 2
    assert not any(process.net_connections("tcp") for process in processes)


@pytest.fixture
def contexts() -> Iterator[Callable[..., zmq.Context]]:
    """Make contexts with any keys; they are closed, with their sockets, after the test."""
    made: list[zmq.Context] = []

    def make(keys: CurveKeys | None) -> zmq.Context:
        made.append(zmq.Context() if keys is None else EngineContext.with_keys(keys))
        return made[-1]

    yield make
    for context in made:
        context.destroy(linger=0)


def refused(context: zmq.Context, address: str) -> zmq.Socket:
    """A DEALER whose connection was turned down, with a request to end the engine in its queue."""
    dealer = context.socket(zmq.DEALER)
    if isinstance(context, EngineContext):
        for option, value in context.tcp_options(address, bind=False).items():
            dealer.set(option, value)
    # Before it connects, or the refusal may be over by the time that anyone looks.
    monitor = dealer.get_monitor_socket(FAILED | zmq.EVENT_DISCONNECTED)
    dealer.connect(address)
    # Where the refusal is over already, the socket has nobody left to send to, and would wait for ever.
    with contextlib.suppress(zmq.Again):
        dealer.send(encode_control(Shutdown()), zmq.NOBLOCK)
    assert monitor.poll(60_000), "it was let in"
    dealer.disable_monitor()
    monitor.close()
    return dealer


def test_nobody_comes_in_without_the_keys(client: RawClient, contexts: Callable[..., zmq.Context]) -> None:
    keys, foreign = client.info.keys, make_curve_keys()
    assert keys is not None
    wrong_server = msgspec.structs.replace(keys, server_public=foreign.server_public)
    wrong_client = msgspec.structs.replace(
        keys, client_public=foreign.client_public, client_secret=foreign.client_secret
    )
    stolen_public = msgspec.structs.replace(keys, client_secret=foreign.client_secret)
    for stranger in (None, foreign, wrong_server, wrong_client, stolen_public):
        context = contexts(stranger)
        sockets = [refused(context, address) for address in all_addresses(client)]
        assert not any(dealer.poll(0) for dealer in sockets)
        for dealer in sockets:
            dealer.close(linger=0)
    assert_goes_on(client, "r")


def test_refusals_do_not_fill_the_log(
    engine: EngineUnderTest, client: RawClient, contexts: Callable[..., zmq.Context]
) -> None:
    keys, foreign = client.info.keys, make_curve_keys()
    assert keys is not None
    stranger = msgspec.structs.replace(foreign, server_public=keys.server_public)
    context = contexts(stranger)
    for _ in range(100):
        refused(context, client.info.address("host.sock")).close(linger=0)
    refusals = [line for line in engine.log().splitlines() if "refused a connection" in line]
    assert len(refusals) == 1
    assert "127.0.0.1" in refusals[0]
    assert_goes_on(client, "r")


def test_garbage_on_every_port_does_no_harm(client: RawClient) -> None:
    noise = random.Random(0)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01"
    mechanisms = [name.ljust(20, b"\0") for name in (b"NULL", b"PLAIN", b"CURVE", b"", b"X" * 20)]
    starts = [b"", b"GET / HTTP/1.1\r\n\r\n", greeting, *(greeting + m + bytes(33) for m in mechanisms)]
    huge = b"\x06" + (1 << 62).to_bytes(8, "big")
    for address in all_addresses(client):
        for start in starts:
            for rest in (b"", huge, noise.randbytes(3000)):
                with connected(address) as stranger:
                    stranger.sendall(start + rest)
    assert_goes_on(client, "r")


def test_more_half_open_connections_than_files_are_borne_and_cut(
    start_networked: StartEngine,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * NUM_HALF_OPEN:
        pytest.skip(f"a process may have no more than {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))
    try:
        client = start_networked().client().attach()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * NUM_HALF_OPEN), hard))
    host = psutil.Process(client.info.host_pid)
    before = host.num_fds()
    strangers = [connected(client.info.address("host.sock")) for _ in range(NUM_HALF_OPEN)]
    try:
        assert_goes_on(client, "r")
        wait_for(lambda: host.num_fds() < before + NUM_HALF_OPEN / 2, "an end", 3 * HANDSHAKE_MS / 1000 + 60)
        assert_goes_on(client, "s")
    finally:
        for stranger in strangers:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def little_room() -> Iterator[None]:
    """Let this process open no more than `ROOM` files besides those it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def crowd(addresses: Iterable[str]) -> Iterator[None]:
    """Strangers at ports of this process, more than it may open files, who come again when they are cut off."""
    ports = [address.rpartition(":")[2] for address in addresses]
    command = [sys.executable, "-c", CROWD, str(2 * ROOM), *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"here\n"
            yield
        finally:
            process.kill()


def test_a_crowd_at_a_clients_ports_ends_neither_its_requests_nor_its_shutdown(
    start_frontend: Callable[..., LLM], little_room: None, caplog: pytest.LogCaptureFixture
) -> None:
    llm = start_frontend(LLM)
    info = llm.llm_engine.connection
    client = llm.llm_engine.engine_core
    assert isinstance(client, MPClient)

    def answer() -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [1]}, sampling, use_tqdm=False)
        return output.outputs[0].token_ids

    def has_room() -> bool:
        with contextlib.suppress(OSError):
            check_room(ROOM // 4)
            return True
        return False

    with crowd(client.cores.addresses):
        wait_for(lambda: "too many connections without a key" in caplog.text, "a bound")
        assert answer() == [2, 3, 4, 5, 6]
        # Those that wait at the ports come in as others are cut off: all of them within four handshakes.
        wait_for(has_room, "room for this process's own files", 4 * HANDSHAKE_MS / 1000 + 60)
        assert answer() == [2, 3, 4, 5, 6]
        llm.shutdown()
    assert not session_processes(info)
    assert not connection_file(info.name).exists()


def test_the_keys_are_in_two_private_files_and_nowhere_else(
    engine: EngineUnderTest, client: RawClient
) -> None:
    engine.wait_ready()
    for path in (connection_file(engine.name), engine_file(engine.run_dir)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert engine.info.keys.client_secret in path.read_text()
    secrets = [engine.info.keys.server_secret.encode(), engine.info.keys.client_secret.encode()]
    public = [engine.info.keys.server_public.encode(), engine.info.keys.client_public.encode()]
    for process in engine.processes():
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{process.pid}/{name}").read_bytes()
            assert not any(key in content for key in secrets + public)
    assert not any(key.decode() in engine.log() for key in secrets + public)
    assert not any(key.decode() in repr(engine.info) for key in secrets + public)
    assert os.path.exists(engine.run_dir)
