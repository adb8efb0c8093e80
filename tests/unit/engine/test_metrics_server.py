"""The metrics port of a host: who asks is answered, and who hangs on disturbs nobody for long."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from nbengine.config import EngineConfig, ModelConfig
from nbengine.engine.host import metrics_server
from nbengine.engine.host.coordinator import DPCoordinator
from nbengine.engine.host.metrics_server import MOST_CONNECTIONS, MetricsServer, serve_metrics
from nbengine.errors import EngineStartError, InvalidArgumentError
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.metrics.exposition import EngineCollector
from nbengine.metrics.requests import RequestStats
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.runtime.connection import ConnectionInfo


@pytest.fixture
def state() -> DPCoordinator:
    return DPCoordinator(2)


@pytest.fixture
def server(state: DPCoordinator) -> Iterator[MetricsServer]:
    server = MetricsServer(0, EngineCollector(lambda: state.snapshot(0.0), "m"))
    yield server
    server.close()


def fetch(server: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[str, str]:
    url = server.address.replace("/metrics", path)
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def value_of(server: MetricsServer, name: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for family in parse(fetch(server)[0])
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


def observe(state: DPCoordinator, rank: int, finished: int) -> None:
    requests = RequestStats(finished=[finished, 0, 0, 0])
    stats = SchedulerStats(engine_index=rank, num_generation_tokens=7 * finished, requests=requests)
    state.observe(EngineCoreOutputs(engine_index=rank, scheduler_stats=stats), 0.0)


def test_it_answers_with_the_newest_reports_of_all_engine_cores(
    server: MetricsServer, state: DPCoordinator
) -> None:
    assert value_of(server, "nbengine_generation_tokens_total", engine="1") == 0
    observe(state, 0, 3)
    observe(state, 1, 5)
    assert value_of(server, "nbengine_generation_tokens_total", engine="0") == 21
    assert value_of(server, "nbengine_request_success_total", engine="1", finished_reason="stop") == 5
    observe(state, 1, 6)
    assert value_of(server, "nbengine_request_success_total", engine="1", finished_reason="stop") == 6


def test_the_form_is_the_one_that_is_asked_for(server: MetricsServer) -> None:
    assert fetch(server)[1].startswith("text/plain")
    body, kind = fetch(server, Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")
    assert fetch(server, "/metrics?name=x")[0]


def test_other_paths_and_methods_are_refused(server: MetricsServer) -> None:
    for path in ("/", "/metrics/", "/../etc/passwd"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            fetch(server, path)
        assert caught.value.code == 404
        caught.value.close()
    request = urllib.request.Request(server.address, data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 501
    caught.value.close()
    with urllib.request.urlopen(urllib.request.Request(server.address, method="HEAD"), timeout=60) as answer:
        assert int(answer.headers["Content-Length"]) > 1000
        assert answer.read() == b""


def test_only_this_machine_is_listened_to(server: MetricsServer) -> None:
    assert urlsplit(server.address).hostname == "127.0.0.1"
    assert server._server.server_address[0] == "127.0.0.1"


def test_silent_connections_end_soon_and_who_asks_comes_behind_them(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.2)
    address = urlsplit(server.address)
    silent = [socket.create_connection((address.hostname, address.port)) for _ in range(MOST_CONNECTIONS + 3)]
    assert fetch(server)[0]
    for connection in silent:
        connection.settimeout(10)
        assert connection.recv(1) == b"", "it has been closed"
        connection.close()


def test_no_more_are_answered_at_a_time_than_is_allowed() -> None:
    inside, full, exceeded, go_on = [0], threading.Event(), threading.Event(), threading.Event()
    lock = threading.Lock()

    def read() -> EngineStats:
        with lock:
            inside[0] += 1
            if inside[0] == MOST_CONNECTIONS:
                full.set()
            elif inside[0] > MOST_CONNECTIONS:
                exceeded.set()
        assert go_on.wait(60)
        with lock:
            inside[0] -= 1
        return EngineStats()

    server = MetricsServer(0, EngineCollector(read, "m"))
    asking = [threading.Thread(target=fetch, args=(server,)) for _ in range(MOST_CONNECTIONS + 3)]
    for thread in asking:
        thread.start()
    assert full.wait(60)
    assert not exceeded.wait(0.3)
    go_on.set()
    for thread in asking:
        thread.join(60)
    server.close()
    assert inside == [0]
    assert not exceeded.is_set()


def test_a_failure_is_logged_and_the_next_one_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[EngineStats | None] = [None, EngineStats([SchedulerStats()])]
    server = MetricsServer(0, EngineCollector(lambda: answers.pop(0), "m"))
    try:
        with pytest.raises(OSError, match="closed connection"):
            fetch(server)
        assert "nbengine_num_requests_running" in fetch(server)[0]
    finally:
        server.close()
    assert "a request for the metrics failed" in caplog.text


def test_it_frees_its_port_and_ends_its_thread() -> None:
    # Somebody else may take a port meanwhile; nobody takes all of them.
    assert any(is_freed_by_a_server() for _ in range(10))


def is_freed_by_a_server() -> bool:
    """Let a server answer and end, and another one have its port; return whether it could."""
    server = MetricsServer(0, EngineCollector(EngineStats, "m"))
    port = int(server.address.split(":")[2].split("/")[0])
    fetch(server)
    server.close()
    assert "nbengine-metrics" not in [thread.name for thread in threading.enumerate()]
    try:
        again = MetricsServer(port, EngineCollector(EngineStats, "m"))
    except EngineStartError:
        return False
    assert fetch(again)[0]
    again.close()
    return True


def info_of(port: int | None) -> ConnectionInfo:
    config = EngineConfig(model=ModelConfig("random-tiny"), metrics_port=port)
    return ConnectionInfo(name="e", run_dir="", log_path="", host_pid=1, host_started=1, config=config)


def test_a_port_in_use_is_named_with_what_to_do(server: MetricsServer, state: DPCoordinator) -> None:
    port = int(server.address.split(":")[2].split("/")[0])
    with pytest.raises(EngineStartError, match=f"metrics_port={port} cannot be used at 127.0.0.1 .*in use"):
        serve_metrics(info_of(port), port, state)


def test_an_engine_serves_metrics_under_its_model_s_name_and_notes_where(state: DPCoordinator) -> None:
    info = info_of(0)
    server = serve_metrics(info, 0, state)
    assert info.metrics_address == server.address
    assert value_of(server, "nbengine_num_requests_running", engine="0", model_name="random-tiny") == 0
    server.close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_there_is_not_is_refused(port: int) -> None:
    with pytest.raises(InvalidArgumentError, match="metrics_port"):
        EngineConfig(metrics_port=port)
