"""The limits of one step, and the order in which requests are admitted."""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.checks import one_of, require, require_count

POLICIES = ("fcfs", "priority")
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step. `long_prefill_token_threshold=0` means no limit for one prompt's share of a step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    stream_interval: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "stream_interval"):
            require_count(name, getattr(self, name))
        threshold = self.long_prefill_token_threshold
        require(
            "long_prefill_token_threshold",
            threshold,
            0 <= threshold < 2**31,
            "0 (off) or at least 1, below 2**31",
        )
        one_of("scheduling_policy", self.scheduling_policy, POLICIES)
