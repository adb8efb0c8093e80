"""The dashboard's figures in words, for its static forms and its text; an unknown one shows as "–"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbengine.client.observe.process_usage import printable
from nbengine.client.observe.trace_mirror import RequestView, TraceMirror
from nbengine.metrics.stats import EngineStats, SchedulerStats, cache_use
from nbengine.units import size
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.waves.timeline import WaveTimeline

UNKNOWN = "–"
MAX_REQUESTS = 30
"""The most rows of the static forms."""
MAX_RANKS = 4
"""The most engine cores that are drawn one by one."""
MAX_WAVE_RANKS = 8
"""The most engine cores in the picture of the waves."""


def count(value: float | None) -> str:
    """Format a count, or a rate of more than a few a second."""
    if value is None:
        return UNKNOWN
    return f"{value:,.1f}" if value < 10 and value != int(value) else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Format a time with three digits: `0.41 ms`, `12.3 ms`, `1.25 s`, `3 min 20 s`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s"


def share(part: float, whole: float) -> str:
    """Format a share in per cent; unknown if `whole` is 0."""
    return f"{100 * part / whole:.3g} %" if whole else UNKNOWN


def kv_use(engines: Sequence[SchedulerStats]) -> str:
    """Format the share of the KV cache in use."""
    return share(*cache_use(engines))


def hit_rate(engines: Sequence[SchedulerStats]) -> str:
    """Format the share of the looked-up prompt tokens that were in the prefix cache, since the start."""
    return share(
        sum(engine.prefix_cache_hits for engine in engines),
        sum(engine.prefix_cache_queries for engine in engines),
    )


def title(state: DashboardState) -> tuple[str, str]:
    """Return the model, and the facts behind it: the engine, its topology, device and number format."""
    label = state.label
    facts = (f"engine {label.name}", label.topology, label.device, label.dtype)
    return printable(label.model), " · ".join(printable(fact) for fact in facts)


def header(state: DashboardState) -> list[tuple[str, str]]:
    """List (name, value) of the figures at the top."""
    rates, engines = state.rates, state.stats.engines
    return [
        ("tokens in", per_second(rates.tokens_in_per_second)),
        ("tokens out", per_second(rates.tokens_out_per_second)),
        ("first token", duration(rates.time_to_first_token)),
        ("between tokens", duration(rates.inter_token_latency)),
        ("memory", UNKNOWN if rates.memory_bytes is None else size(rates.memory_bytes)),
        ("KV use", kv_use(engines)),
        ("prefix hits", hit_rate(engines)),
        ("requests", requests_line(state.stats)),
    ]


def per_second(rate: float | None) -> str:
    """Format a rate."""
    return UNKNOWN if rate is None else f"{count(rate)}/s"


def requests_line(stats: EngineStats) -> str:
    """Count the requests that run and wait."""
    if not stats.engines:
        return UNKNOWN
    running = sum(engine.num_running_reqs for engine in stats.engines)
    waiting = sum(engine.num_waiting_reqs for engine in stats.engines)
    return f"{running:,} + {waiting:,} waiting" if waiting else f"{running:,} running"


def mirrors(state: DashboardState) -> tuple[list[tuple[int, TraceMirror]], str]:
    """Choose the engine cores that are drawn, by rank, and make a note about the others."""
    ranked = sorted(state.mirrors.items())
    more = len(ranked) - MAX_RANKS
    note = f"… and {more:,} more engine core{'' if more == 1 else 's'}" if more > 0 else ""
    return ranked[:MAX_RANKS], note


def has_waves(state: DashboardState) -> bool:
    """Return whether there is more than one engine core to compare over time."""
    return len(state.mirrors) > 1 or state.label.lock_step


def waves(state: DashboardState) -> WaveTimeline:
    """Prepare the timeline: with a printable name and no more engine cores than there is room for."""
    timeline = state.waves
    shown = set(timeline.ranks[:MAX_WAVE_RANKS])
    spans = tuple(
        replace(span, ranks={rank: part for rank, part in span.ranks.items() if rank in shown})
        for span in timeline.spans
    )
    return replace(timeline, engine=printable(timeline.engine), spans=spans)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request as a row of the table; texts are printable, but not escaped."""

    rank: int
    number: int
    name: str
    state: str
    prompt: str
    output: str
    first_token: str
    total_time: str
    preemptions: str
    is_own: bool
    cached: int
    """The tokens found in the prefix cache.

    `computed` has the computed prompt tokens and `generated` the output tokens; all three are parts of
    `whole`.
    """
    computed: int
    generated: int
    whole: int

    @property
    def done(self) -> float:
        """Return the share that is done of all that the request may need, 0 to 1."""
        return min(1.0, (self.cached + self.computed + self.generated) / self.whole) if self.whole else 0.0


def request_rows(state: DashboardState, limit: int = MAX_REQUESTS) -> tuple[list[RequestRow], int]:
    """Make the table, and count the requests that it leaves out."""
    rows = [_row(state, rank, request) for rank, request in state.requests(limit)]
    known = sum(len(mirror.requests) + len(mirror.finished) for mirror in state.mirrors.values())
    return rows, known - len(rows)


def _row(state: DashboardState, rank: int, request: RequestView) -> RequestRow:
    added = request.added
    cached = max(0, request.num_cached_tokens)
    in_prompt = min(request.num_computed_tokens, added.num_prompt_tokens)
    cached_now = min(cached, in_prompt)
    end = request.ended_at if request.ended_at is not None else state.time
    how = request.finish_reason if request.finish_reason is not None else request.state
    prompt = f"{added.num_prompt_tokens:,}"
    return RequestRow(
        rank=rank,
        number=added.number,
        name=printable(added.request_id),
        state=printable(how),
        prompt=f"{prompt} ({cached:,} cached)" if cached else prompt,
        output=f"{request.num_output_tokens:,}",
        first_token=duration(_after(request.first_token_at, added.time)),
        total_time=duration(_after(end, added.time)),
        preemptions=f"{request.num_preemptions:,}",
        is_own=added.request_id in state.own_requests,
        cached=cached_now,
        computed=in_prompt - cached_now,
        generated=request.num_output_tokens,
        whole=added.max_total_tokens,
    )


def _after(moment: float | None, start: float) -> float | None:
    return None if moment is None else max(0.0, moment - start)
