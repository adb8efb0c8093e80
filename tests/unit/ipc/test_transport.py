"""Addresses on a network, and sockets that nobody without the keys can reach."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from nbengine.errors import NBEngineError
from nbengine.ipc import transport
from nbengine.ipc.connection_watch import ConnectionWatch
from nbengine.ipc.curve import CurveKeys, make_curve_keys
from nbengine.ipc.liveness import machine_id
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import (
    EngineContext,
    any_port,
    bound_address,
    host_of,
    is_tcp,
    own_address,
    port_of,
)

LOCAL = "tcp://127.0.0.1:*"
MakeContext = Callable[[CurveKeys | None], EngineContext]


@pytest.fixture
def make_context() -> Iterator[MakeContext]:
    contexts: list[EngineContext] = []

    def make(keys: CurveKeys | None) -> EngineContext:
        contexts.append(EngineContext.with_keys(keys))
        return contexts[-1]

    yield make
    for context in contexts:
        context.destroy(linger=0)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_the_way_to_oneself_is_over_the_loopback() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_this_machine_has_one_address_that_is_none_of_all_interfaces() -> None:
    address = ipaddress.ip_address(own_address())
    assert not address.is_unspecified
    with socket.socket() as probe:
        probe.bind((str(address), 0))


def test_a_machine_without_a_way_out_has_the_address_of_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(*_: object, **__: object) -> None:
        raise OSError("no route")

    def interfaces(**addresses: str) -> None:
        found = {name: [SimpleNamespace(address=address)] for name, address in addresses.items()}
        monkeypatch.setattr(transport.psutil, "net_if_addrs", lambda: found)

    monkeypatch.setattr(transport.socket, "getaddrinfo", no_route)
    states = {name: SimpleNamespace(isup=name != "down") for name in ("lo", "down", "mac", "local", "eth0")}
    monkeypatch.setattr(transport.psutil, "net_if_stats", lambda: states)
    useless = {"lo": "127.0.0.1", "down": "10.0.0.9", "mac": "00:11:22:33:44:55", "local": "169.254.1.1"}
    interfaces(**useless, eth0="10.0.0.7")
    assert own_address() == "10.0.0.7"
    interfaces(**useless)
    with pytest.raises(NBEngineError, match="data_parallel_address"):
        own_address()
    with pytest.raises(NBEngineError, match="no route to 'elsewhere'"):
        own_address("elsewhere")


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "tcp://127.0.0.1:*"), ("::1", "tcp://[::1]:*")])
def test_addresses_are_numbers(host: str, address: str) -> None:
    assert any_port(host) == address
    assert host_of(address) == host
    assert is_tcp(address)


def test_a_name_that_means_nothing_is_an_error() -> None:
    with pytest.raises(NBEngineError, match=r"no address for 'no\.such\.host\.'"):
        any_port("no.such.host.")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here"))],
)
def test_ends_with_the_same_keys_exchange_messages(make_context: MakeContext, host: str) -> None:
    keys = make_curve_keys()
    pull = make_socket(make_context(keys), any_port(host), zmq.PULL, bind=True)
    address = bound_address(pull)
    assert host_of(address) == host
    assert port_of(address) > 0
    push = make_socket(make_context(keys.for_clients()), address, zmq.PUSH, bind=False)
    push.send(b"x")
    assert pull.poll(60_000)
    assert pull.recv() == b"x"
    push.close()
    pull.close()


def test_no_socket_is_on_a_network_without_keys(make_context: MakeContext) -> None:
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for context in (plain, make_context(None)):
        for bind in (True, False):
            with pytest.raises(NBEngineError, match="keys"):
                make_socket(context, "tcp://127.0.0.1:1" if not bind else LOCAL, zmq.PAIR, bind=bind)
    with pytest.raises(NBEngineError, match="keys"):
        make_socket(make_context(make_curve_keys().for_clients()), LOCAL, zmq.PULL, bind=True)
    plain.term()


def test_several_contexts_each_let_their_own_engines_clients_in(make_context: MakeContext) -> None:
    keys = [make_curve_keys() for _ in range(3)]
    pulls = [make_socket(make_context(k), LOCAL, zmq.PULL, bind=True) for k in keys]
    for number, pull in enumerate(pulls):
        mixed = msgspec.structs.replace(
            keys[(number + 1) % 3].for_clients(), server_public=keys[number].server_public
        )
        stranger = make_socket(make_context(mixed), bound_address(pull), zmq.PUSH, bind=False)
        stranger.send(b"stranger")
        friend = make_socket(make_context(keys[number]), bound_address(pull), zmq.PUSH, bind=False)
        friend.send(b"friend")
        assert pull.poll(60_000)
        assert pull.recv() == b"friend"
        assert not pull.poll(50)
        stranger.close(linger=0)
        friend.close()
    for pull in pulls:
        pull.close()


def test_the_gatekeeper_is_there_only_where_something_listens_on_a_network(
    make_context: MakeContext, tmp_path: object
) -> None:
    def gatekeepers() -> int:
        return sum(thread.name == "nbengine-gatekeeper" for thread in threading.enumerate())

    before = gatekeepers()
    keys = make_curve_keys()
    context, other = make_context(keys), make_context(keys)
    local = make_socket(context, f"ipc://{tmp_path}/s", zmq.PULL, bind=True)
    client = make_socket(other, "tcp://127.0.0.1:9", zmq.PUSH, bind=False)
    assert gatekeepers() == before
    sockets = [make_socket(context, LOCAL, zmq.PULL, bind=True) for _ in range(2)]
    assert gatekeepers() == before + 1
    for item in (*sockets, local, client):
        item.close()
    context.term()
    assert gatekeepers() == before


def test_a_refusal_is_logged_once_a_minute(
    make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    keys, foreign = make_curve_keys(), make_curve_keys()
    pull = make_socket(make_context(keys), LOCAL, zmq.PULL, bind=True)
    strange = msgspec.structs.replace(foreign, server_public=keys.server_public)
    context = make_context(strange)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            push = context.socket(zmq.PUSH)
            for option, value in context.tcp_options(bound_address(pull), bind=False).items():
                push.set(option, value)
            # Before it connects, or the refusal may be over by the time that anyone looks.
            monitor = push.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            push.connect(bound_address(pull))
            assert monitor.poll(60_000)
            push.disable_monitor()
            monitor.close()
            push.close(linger=0)
    assert len([record for record in caplog.records if "refused" in record.message]) == 1
    pull.close()


def test_keys_are_shown_by_nothing() -> None:
    keys = make_curve_keys()
    assert msgspec.json.decode(msgspec.json.encode(keys), type=CurveKeys) == keys
    assert repr(keys) == "CurveKeys(...)"
    assert keys.__rich_repr__() == []
    assert keys.for_clients().server_secret == ""
    assert keys.server_public == zmq.curve_public(keys.server_secret.encode()).decode()


def test_a_watch_tells_of_a_connection_that_comes_and_breaks(make_context: MakeContext) -> None:
    keys = make_curve_keys()
    server, client = make_context(keys), make_context(keys)
    pull = make_socket(server, LOCAL, zmq.PULL, bind=True)
    watch = ConnectionWatch(client, "push")
    # Before it connects, or the connection may stand by the time that it is watched.
    announce = partial(ConnectionWatch.announce, name="push")
    push = make_socket(client, bound_address(pull), zmq.PUSH, bind=False, prepare=announce)
    assert watch.socket.poll(60_000)
    assert watch.read() == [True]
    pull.close()
    assert watch.socket.poll(60_000)
    assert watch.read() == [False]
    ConnectionWatch.withdraw(push)
    assert watch.socket.poll(60_000)
    watch.read()
    assert watch.ended
    push.close()
    watch.close()


def test_processes_with_the_same_pids_have_the_same_machine() -> None:
    assert machine_id()
    assert machine_id() == machine_id()
