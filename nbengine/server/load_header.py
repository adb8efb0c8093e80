"""The load of the engine in the header of an answer, in the form of Open Request Cost Aggregation (ORCA), for
gateways that choose between servers."""

from __future__ import annotations

import msgspec

from nbengine.errors import InvalidArgumentError
from nbengine.metrics.stats import EngineStats, cache_use

FORMATS = ("text", "json")


def load_format(asked: bytes | None) -> str | None:
    """Return the format that the header `endpoint-load-metrics-format` asks for; None: no load is wanted.

    Raises:
        InvalidArgumentError: there is no such format.
    """
    if asked is None:
        return None
    kind = asked.decode("latin-1").strip().lower()
    if kind not in FORMATS:
        raise InvalidArgumentError("endpoint-load-metrics-format", kind, "one of " + ", ".join(FORMATS))
    return kind


def load_metrics(stats: EngineStats) -> dict[str, float]:
    """Return what gateways go by, over all engine cores: use of the cache, and requests."""
    engines = stats.engines
    used, total = cache_use(engines)
    return {
        "kv_cache_usage_perc": round(used / total, 4) if total else 0.0,
        "num_requests_running": sum(engine.num_running_reqs for engine in engines),
        "num_requests_waiting": sum(engine.num_waiting_reqs for engine in engines),
    }


def load_header(stats: EngineStats, kind: str) -> bytes:
    """Return the value of the header `endpoint-load-metrics`."""
    metrics = load_metrics(stats)
    if kind == "json":
        return b"JSON " + msgspec.json.encode({"named_metrics": metrics})
    return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items()).encode()
