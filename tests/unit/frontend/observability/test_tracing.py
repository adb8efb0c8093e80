"""A span has the times and figures of its request, and the place in a trace that the headers name."""

from __future__ import annotations

import time

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanKind, StatusCode

from nbengine.errors import NotSupportedError
from nbengine.frontend.observability.request_watch import RequestRecord
from nbengine.frontend.observability.tracing import RequestTracer, otlp_provider
from nbengine.outputs import RequestMetrics
from nbengine.sampling_params import SamplingParams

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


class Span(NonRecordingSpan):
    def __init__(self, name, context, kind, attributes, start_time) -> None:
        super().__init__(trace.get_current_span(context).get_span_context())
        self.name, self.kind, self.attributes, self.start = name, kind, attributes, start_time
        self.events: list[tuple[str, int]] = []
        self.status: trace.Status | None = None
        self.end_time = 0

    def add_event(self, name, attributes=None, timestamp=None) -> None:
        self.events.append((name, timestamp))

    def set_status(self, status, description=None) -> None:
        self.status = status

    def end(self, end_time=None) -> None:
        self.end_time = end_time


class Provider(trace.TracerProvider, trace.NoOpTracer):
    """A provider that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def get_tracer(self, name, version=None, *_, **__):
        assert name == "nbengine"
        return self

    def start_span(self, name, context=None, kind=None, attributes=None, start_time=None, **_):
        span = Span(name, context, kind, attributes, start_time)
        self.spans.append(span)
        return span


def record(headers: dict[str, str] | None = None, **fields) -> RequestRecord:
    now = time.monotonic()
    metrics = RequestMetrics(
        now - 3,
        queued_time=0.25,
        first_token_time=now - 2,
        finished_time=now - 1,
        num_generation_tokens=7,
        data_parallel_ranks=(1,),
    )
    params = SamplingParams(temperature=0.5, max_tokens=9)
    given = {"finish_reasons": ["stop"], "num_cached_tokens": 4} | fields
    return RequestRecord("r", "r-1", "a secret", 12, params, metrics, headers, **given)


def span_of(record: RequestRecord) -> Span:
    provider = Provider()
    RequestTracer("the-model", provider, clock=lambda: 1_000_000.0).ended(record)
    (span,) = provider.spans
    return span


def test_a_span_lasts_from_arrival_to_end_with_the_first_token_between() -> None:
    span = span_of(record())
    assert span.name == "llm_request"
    assert span.kind is SpanKind.SERVER
    assert span.start / 1e9 == pytest.approx(1_000_000 - 3, abs=0.5)
    assert span.end_time - span.start == pytest.approx(2e9, abs=1e6)
    ((name, at),) = span.events
    assert name == "first token"
    assert at - span.start == pytest.approx(1e9, abs=1e6)
    assert span.status is None


def test_a_span_has_the_figures_and_nothing_that_was_written() -> None:
    attributes = span_of(record()).attributes
    expected = {
        "gen_ai.request.model": "the-model",
        "gen_ai.request.id": "r",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": pytest.approx(1),
        "gen_ai.latency.e2e": pytest.approx(2),
        "nbengine.data_parallel_ranks": (1,),
    }
    assert {name: attributes[name] for name in expected} == expected
    assert "gen_ai.request.seed" not in attributes, "what was not asked for is left out"
    assert "secret" not in str(attributes)


@pytest.mark.parametrize("name", ["traceparent", "Traceparent"])
def test_it_belongs_to_the_trace_of_the_headers(name: str) -> None:
    context = span_of(record({name: f"00-{TRACE_ID}-{SPAN_ID}-01"})).get_span_context()
    assert trace.format_trace_id(context.trace_id) == TRACE_ID
    assert trace.format_span_id(context.span_id) == SPAN_ID


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}])
def test_without_a_trace_it_begins_one(headers: dict[str, str] | None) -> None:
    assert not span_of(record(headers)).get_span_context().is_valid


def test_an_error_is_the_status_of_the_span() -> None:
    status = span_of(record(error="the engine has ended", finish_reasons=[])).status
    assert status.status_code is StatusCode.ERROR
    assert status.description == "the engine has ended"


def test_a_package_that_is_missing_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter", None)
    with pytest.raises(NotSupportedError, match=r"pip install nbengine\[otel\]"):
        otlp_provider("http://localhost:4318/v1/traces")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    with pytest.raises(NotSupportedError, match=r"pip install nbengine\[otel\]"):
        RequestTracer("m")
