"""Those who are told of a server's requests: the log, with prompts only where they are wanted, and a collector of traces."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from nbengine.frontend.observability.request_log import logger
from nbengine.frontend.observability.request_watch import RequestObserver, RequestRecord
from nbengine.frontend.observability.tracing import otlp_provider
from nbengine.outputs import RequestMetrics
from nbengine.sampling_params import SamplingParams
from nbengine.server import process
from nbengine.server.settings import ServerSettings

ENGINE: Any = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(model="the-model")))
SECRET = "what nobody else is to read"


@pytest.fixture
def request_logger() -> Iterator[logging.Logger]:
    """The logger of requests, which is put back after the test."""
    handlers, level, propagates = list(logger.handlers), logger.level, logger.propagate
    yield logger
    logger.handlers, logger.propagate = handlers, propagates
    logger.setLevel(level)


def observers(**settings: Any) -> list[RequestObserver]:
    return process.observers_of(ServerSettings(**settings), ENGINE)


def record() -> RequestRecord:
    now = time.monotonic()
    metrics = RequestMetrics(now - 1, first_token_time=now, finished_time=now, num_generation_tokens=7)
    return RequestRecord("cmpl-1", "r-1", SECRET, 12, SamplingParams(), metrics, finish_reasons=["stop"])


@pytest.mark.parametrize(
    ("settings", "is_logged", "has_prompt"),
    [
        ({}, False, False),
        ({"log_requests": True}, True, False),
        ({"log_prompts": True}, True, True),
    ],
)
def test_requests_are_logged_with_their_prompts_only_if_that_is_wanted(
    settings: dict[str, Any],
    is_logged: bool,
    has_prompt: bool,
    request_logger: logging.Logger,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for observer in observers(**settings):
        observer.ended(record())
    said = capsys.readouterr().err
    assert ("request cmpl-1: 12 prompt tokens, 7 tokens" in said) == is_logged
    assert (SECRET in said) == has_prompt


class Collector(BaseHTTPRequestHandler):
    """A collector that keeps what it gets."""

    got: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_collector_gets_a_span_of_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def kept(endpoint: str) -> Any:
        made.append(otlp_provider(endpoint))
        return made[-1]

    monkeypatch.setattr(process, "otlp_provider", kept)
    collector = type("Collecting", (Collector,), {"got": []})
    with HTTPServer(("127.0.0.1", 0), collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/v1/traces"
            [tracer] = observers(traces_endpoint=url)
            tracer.ended(record())
            [provider] = made
            assert isinstance(provider, TracerProvider)
            assert provider.force_flush()
            provider.shutdown()
        finally:
            server.shutdown()
            thread.join()
    [(path, body)] = collector.got
    assert path == "/v1/traces"
    for text in (b"llm_request", b"the-model", b"cmpl-1", b"service.name"):
        assert text in body
    assert SECRET.encode() not in body
