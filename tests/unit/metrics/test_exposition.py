"""Prometheus' own parser finds in the exposition what the engine cores have counted."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_client.registry import CollectorRegistry

from nbengine.metrics.exposition import HISTOGRAMS, EngineCollector, exposition
from nbengine.metrics.requests import RequestStats
from nbengine.metrics.stats import EngineStats, SchedulerStats, WorkerStats
from nbengine.server.load_header import load_metrics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PUBLISHED = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    *(f"{name}_{part}" for name, _ in HISTOGRAMS.values() for part in ("bucket", "count", "sum")),
)


def two_cores() -> EngineStats:
    requests = RequestStats(finished=[4, 3, 2, 1])
    for value in (0.004, 0.004, 0.25, 4000.0):
        requests.time_to_first_token.observe(value)
    requests.generation_tokens.observe(12)
    busy = SchedulerStats(
        engine_index=0,
        num_running_reqs=3,
        num_waiting_reqs=5,
        num_blocks=8,
        num_free_blocks=2,
        prefix_cache_queries=100,
        prefix_cache_hits=40,
        num_preemptions=6,
        num_prompt_tokens=101,
        num_generation_tokens=202,
        is_paused=True,
        sleep_level=1,
        workers=[WorkerStats(0, 1000), WorkerStats(1, 2000)],
        requests=requests,
    )
    return EngineStats(engines=[busy, SchedulerStats(engine_index=1)])


def samples(accept: str = "") -> dict[tuple[str, str, str], float]:
    """Return the values by name without prefix, engine, and the label that only this name has."""
    body, kind = exposition(EngineCollector(two_cores, 'a"model\n'), accept)
    assert kind.startswith(accept.partition(";")[0] or "text/plain")
    parser = parse_openmetrics if accept else parse
    found = {}
    for family in parser(body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == 'a"model\n'
            engine = labels.pop("engine")
            (rest,) = labels.values() or ("",)
            found[sample.name.removeprefix("nbengine_"), engine, rest] = sample.value
    return found


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_every_published_name_has_a_series_for_each_engine_core(accept: str) -> None:
    found = samples(accept)
    for engine in "01":
        assert {name for name, at, _ in found if at == engine} >= set(PUBLISHED)


def test_a_cache_of_states_alone_is_as_full_as_its_slots_are() -> None:
    stats = SchedulerStats(num_state_slots=8, num_free_state_slots=2)
    assert stats.kv_cache_usage == 0.75
    assert load_metrics(EngineStats(engines=[stats, SchedulerStats()]))["kv_cache_usage_perc"] == 0.75
    assert SchedulerStats().kv_cache_usage == 0


def test_gauges_and_counters_have_the_scheduler_s_values() -> None:
    found = samples()
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 5,
        "kv_cache_usage": 0.75,
        "kv_cache_blocks": 8,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40,
        "num_preemptions_total": 6,
        "prompt_tokens_total": 101,
        "generation_tokens_total": 202,
        "paused": 1,
        "sleep_level": 1,
    }
    assert {name: found[name, "0", ""] for name in expected} == expected
    assert found["num_requests_running", "1", ""] == 0
    assert {rank: found["worker_memory_bytes", "0", rank] for rank in "01"} == {"0": 1000, "1": 2000}


def test_ends_are_told_apart_by_their_reasons() -> None:
    found = samples()
    ends = {
        reason: found["request_success_total", "0", reason] for reason in ("stop", "length", "abort", "error")
    }
    assert ends == {"stop": 4, "length": 3, "abort": 2, "error": 1}


def test_buckets_are_cumulative_and_end_with_the_count() -> None:
    found = samples()
    name = "time_to_first_token_seconds"
    at = {
        bound: found[f"{name}_bucket", "0", bound]
        for bound in ("0.003", "0.005", "0.2", "0.3", "1800.0", "+Inf")
    }
    assert at == {"0.003": 0, "0.005": 2, "0.2": 2, "0.3": 3, "1800.0": 3, "+Inf": 4}
    assert found[f"{name}_count", "0", ""] == 4
    assert found[f"{name}_sum", "0", ""] == pytest.approx(4000.258)
    assert found["request_generation_tokens_bucket", "0", "20.0"] == 1
    assert found[f"{name}_count", "1", ""] == 0


def test_it_joins_others_in_a_registry_and_is_read_only_when_asked() -> None:
    asked = []
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: (asked.append(1), two_cores())[1], "m"))
    assert not asked
    assert b"nbengine_num_requests_running" in exposition(registry)[0]
    assert asked == [1]


def test_an_engine_without_engine_cores_has_names_and_no_series() -> None:
    body, _ = exposition(EngineCollector(EngineStats, "m"))
    assert b"# TYPE nbengine_num_requests_running gauge" in body
    assert not [line for line in body.decode().splitlines() if not line.startswith("#")]
