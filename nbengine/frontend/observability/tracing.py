"""Requests as spans of OpenTelemetry (the extra `otel`): one span for each, made when the request has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbengine.errors import NotSupportedError
from nbengine.frontend.observability.request_watch import RequestRecord
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import AttributeValue

_MISSING = "spans need the packages of OpenTelemetry: pip install nbengine[otel] ({})"
SPAN_NAME = "llm_request"


class RequestTracer:
    """An observer that makes a span of each request, with its times as events and its figures as attributes.

    A span is part of the trace that the request's headers name (`traceparent`, `tracestate`), or begins one of
    its own. The attributes have the names of the conventions for generative models; there are no prompts and
    no answers among them.

    Args:
        model_name: the model, as the spans name it.
        provider: where the spans go; None takes the one that the program has set up, if any.
        clock: seconds since 1970.

    Raises:
        NotSupportedError: OpenTelemetry is not installed.
    """

    def __init__(
        self,
        model_name: str,
        provider: TracerProvider | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise NotSupportedError(_MISSING.format(error)) from None
        self._model_name = model_name
        self._tracer = (provider or trace.get_tracer_provider()).get_tracer("nbengine", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock

    def ended(self, record: RequestRecord) -> None:
        """Make the span of a request that has ended."""
        from opentelemetry.trace import SpanKind

        now, metrics = time.monotonic(), record.metrics
        # The record has times of the monotonic clock.
        since_1970 = self._clock() - now
        end = now if metrics.finished_time is None else metrics.finished_time
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._context_of(record),
            kind=SpanKind.SERVER,
            attributes=_attributes(record, self._model_name, end),
            start_time=_nanoseconds(since_1970 + metrics.arrival_time),
        )
        if metrics.first_token_time is not None:
            span.add_event("first token", timestamp=_nanoseconds(since_1970 + metrics.first_token_time))
        _set_status(span, record)
        span.end(_nanoseconds(since_1970 + end))

    def _context_of(self, record: RequestRecord) -> Context:
        # Header names have no case, and the propagator looks for small letters.
        headers = {name.lower(): value for name, value in (record.trace_headers or {}).items()}
        return self._propagator.extract(headers)


def otlp_provider(endpoint: str) -> TracerProvider:
    """Return a provider that sends spans to a collector, in batches on a thread of its own.

    Args:
        endpoint: the collector's address for OTLP over HTTP, as `http://localhost:4318/v1/traces`.

    Raises:
        NotSupportedError: OpenTelemetry's SDK or its exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise NotSupportedError(_MISSING.format(error)) from None
    provider: TracerProvider = SdkTracerProvider(
        resource=Resource.create({"service.name": "nbengine", "service.version": __version__})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def _set_status(span: Span, record: RequestRecord) -> None:
    from opentelemetry.trace import Status, StatusCode

    if record.error is not None:
        span.set_status(Status(StatusCode.ERROR, record.error))


def _attributes(record: RequestRecord, model_name: str, end: float) -> dict[str, AttributeValue]:
    metrics = record.metrics
    found: dict[str, AttributeValue | None] = {
        **_asked(record.params),
        "gen_ai.request.model": model_name,
        "gen_ai.request.id": record.request_id,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.usage.output_tokens": metrics.num_generation_tokens,
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
        "gen_ai.latency.time_in_queue": metrics.queued_time,
        "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
        "gen_ai.latency.e2e": end - metrics.arrival_time,
        "nbengine.num_preemptions": metrics.num_preemptions,
        "nbengine.data_parallel_ranks": metrics.data_parallel_ranks,
    }
    return {name: value for name, value in found.items() if value is not None}


def _asked(params: SamplingParams | PoolingParams) -> dict[str, AttributeValue | None]:
    if isinstance(params, PoolingParams):
        return {"gen_ai.operation.name": "embeddings" if params.task == "embed" else params.task}
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
