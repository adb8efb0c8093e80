"""The work of engine cores between two states of their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbengine.metrics.requests import RequestStats, added_up
from nbengine.metrics.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class Interval:
    """The work of some engine cores, all together, in a number of seconds."""

    seconds: float
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    requests: RequestStats
    """The requests that had a first token or ended in the interval."""

    @classmethod
    def between(
        cls, earlier: Sequence[SchedulerStats], later: Sequence[SchedulerStats], seconds: float
    ) -> Interval:
        """Return what the engine cores of `later` have done since `earlier`, `seconds` before.

        An engine core that was not there yet, or was started again since, has begun at 0.
        """
        before = {core.engine_index: core for core in earlier}
        works = [_since(core, before.get(core.engine_index)) for core in later]
        prompt, generation, queries, hits, preemptions = (
            sum(counts[column] for counts, _ in works) for column in range(5)
        )
        requests = added_up(requests for _, requests in works)
        return cls(seconds, prompt, generation, queries, hits, preemptions, requests)

    def per_second(self, count: int) -> float:
        """Return the rate of one of the counts."""
        return count / self.seconds if self.seconds > 0 else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Return the share of the prompt tokens looked up that were found in the prefix cache."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else None

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing was computed and no request ended."""
        return not (self.prompt_tokens or self.generation_tokens or self.requests.num_finished)


def _counts(core: SchedulerStats) -> tuple[int, int, int, int, int]:
    return (
        core.num_prompt_tokens,
        core.num_generation_tokens,
        core.prefix_cache_queries,
        core.prefix_cache_hits,
        core.num_preemptions,
    )


def _since(core: SchedulerStats, before: SchedulerStats | None) -> tuple[tuple[int, ...], RequestStats]:
    requests = core.requests or RequestStats()
    now = _counts(core)
    if before is None:
        return now, requests
    then = _counts(before)
    if any(new < old for new, old in zip(now, then, strict=True)):
        return now, requests
    earlier = before.requests or RequestStats()
    return tuple(new - old for new, old in zip(now, then, strict=True)), requests.since(earlier)
