"""The statistics of an engine in the form that Prometheus reads, made by prometheus_client (the extra `metrics`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nbengine.metrics.requests import FINISHED_REASONS, RequestStats
from nbengine.metrics.stats import EngineStats, SchedulerStats

PREFIX = "nbengine_"
LABELS = ("engine", "model_name")
"""The labels of every series: the rank of the engine core, and the model."""

_Value = Callable[[SchedulerStats], float]

GAUGES: dict[str, tuple[str, _Value]] = {
    "num_requests_running": ("Requests that steps compute.", lambda s: s.num_running_reqs),
    "num_requests_waiting": ("Requests that wait for a place in a step.", lambda s: s.num_waiting_reqs),
    "kv_cache_usage": (
        "Share of the KV cache's blocks in use, from 0 to 1 (of its slots, where it has no blocks).",
        lambda s: s.kv_cache_usage,
    ),
    "kv_cache_blocks": ("Blocks of the KV cache.", lambda s: s.num_blocks),
    "kv_cache_cached_blocks": ("Blocks that can be found by their prefix.", lambda s: s.num_cached_blocks),
    "sleep_level": ("0: awake, 1: without KV cache, 2: without weights, too.", lambda s: s.sleep_level),
    "paused": ("1 while new requests wait until the engine is resumed.", lambda s: s.is_paused),
}
COUNTERS: dict[str, tuple[str, _Value]] = {
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_cache_queries,
    ),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
    "num_preemptions": ("Requests that lost their blocks and waited again.", lambda s: s.num_preemptions),
    "prompt_tokens": ("Prompt tokens computed or found.", lambda s: s.num_prompt_tokens),
    "generation_tokens": ("Tokens sampled.", lambda s: s.num_generation_tokens),
}
HISTOGRAMS = {
    "time_to_first_token": ("time_to_first_token_seconds", "From a request's arrival to its first token."),
    "inter_token_latency": (
        "inter_token_latency_seconds",
        "Between two tokens: the mean of each request that ended.",
    ),
    "e2e_latency": ("e2e_request_latency_seconds", "From a request's arrival to its end."),
    "queue_time": ("request_queue_time_seconds", "From a request's arrival to its first step."),
    "prefill_time": ("request_prefill_time_seconds", "From a request's first step to its first token."),
    "decode_time": ("request_decode_time_seconds", "From a request's first token to its end."),
    "prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a request that ended."),
    "generation_tokens": ("request_generation_tokens", "Sampled tokens of a request that ended."),
}
"""By the field of `RequestStats`: the name without prefix, and the meaning."""


class EngineCollector(Collector):
    """A collector for a registry of prometheus_client; it reads the statistics whenever somebody asks.

    Args:
        read: returns the newest statistics; called on the thread that asks.
        model_name: the label `model_name` of every series.
    """

    def __init__(self, read: Callable[[], EngineStats], model_name: str) -> None:
        self._read = read
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Return every metric, with a series for each engine core."""
        return metrics_of(self._read(), self._model_name)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that a registry does not ask for the statistics when it gets the collector."""
        return ()


def exposition(collector: Collector, accept: str = "") -> tuple[bytes, str]:
    """Return what a request with this Accept header is answered, and its content type.

    `collector` is an `EngineCollector`, or a registry of several collectors.
    """
    encode, content_type = choose_encoder(accept)
    return encode(collector), content_type


def metrics_of(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    """Make the metrics of all engine cores; one that has told nothing yet has zeros."""
    cores = [(core, [str(core.engine_index), model_name]) for core in stats.engines]
    for name, (meaning, value) in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, meaning, labels=LABELS)
        for core, labels in cores:
            gauge.add_metric(labels, value(core))
        yield gauge
    for name, (meaning, value) in COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, meaning, labels=LABELS)
        for core, labels in cores:
            counter.add_metric(labels, value(core))
        yield counter
    yield _memory(cores)
    requests = [(core.requests or RequestStats(), labels) for core, labels in cores]
    yield _ends(requests)
    for name, (metric_name, meaning) in HISTOGRAMS.items():
        yield _histogram(name, metric_name, meaning, requests)


def _memory(cores: Sequence[tuple[SchedulerStats, list[str]]]) -> Metric:
    meaning = "Memory that a worker holds: torch's on a GPU, the process's on a CPU."
    gauge = GaugeMetricFamily(f"{PREFIX}worker_memory_bytes", meaning, labels=(*LABELS, "worker"))
    for core, labels in cores:
        for worker in core.workers:
            gauge.add_metric([*labels, str(worker.rank)], worker.memory_bytes)
    return gauge


def _ends(requests: Sequence[tuple[RequestStats, list[str]]]) -> Metric:
    meaning = "Requests that have ended, by reason."
    counter = CounterMetricFamily(f"{PREFIX}request_success", meaning, labels=(*LABELS, "finished_reason"))
    for stats, labels in requests:
        for reason, count in zip(FINISHED_REASONS, stats.finished, strict=True):
            counter.add_metric([*labels, reason], count)
    return counter


def _histogram(
    name: str, metric_name: str, meaning: str, requests: Sequence[tuple[RequestStats, list[str]]]
) -> Metric:
    family = HistogramMetricFamily(PREFIX + metric_name, meaning, labels=LABELS)
    for stats, labels in requests:
        histogram = stats.histograms()[name]
        bounds = [*map(floatToGoString, histogram.BOUNDS), "+Inf"]
        buckets = list(zip(bounds, histogram.cumulated(), strict=True))
        family.add_metric(labels, buckets, histogram.total)
    return family
