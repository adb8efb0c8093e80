"""The cases that are measured: each has a batch, a figure that is made of its times, and a floor."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from peers.costs import KV_BYTES, ModelCosts, Rates
from peers.protocol import Answer, Job

START_PROMPT = 16
LONG = 1024
"""Tokens of all prompts together, from which on a run needs no repetition."""
VERY_LONG = 4096
"""Tokens of a prompt, from which on a run warms up by itself."""
IN_USE = 4096
"""Tokens whose keys and values an engine has when its memory is measured: those of one request, which all can take."""
FIRST_ID, LAST_ID = 100, 40000
"""Token ids are drawn from here, unless the vocabulary is smaller."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch, and which of its figures counts."""

    name: str
    kind: str
    """"decode" (tokens a second after the first), "prefill" (prompt tokens a second until the first),
    "streams" (new tokens a second, prompts included), "start" (seconds from nothing to the first token) or
    "memory" (MiB when the last token is computed)."""
    streams: int
    prompt: int
    new_tokens: int

    @property
    def unit(self) -> str:
        """Return the unit of the figure."""
        return {"start": "s", "memory": "MiB"}.get(self.kind, "tok/s")

    @property
    def more_is_better(self) -> bool:
        """Tell whether the figure is a rate."""
        return self.unit == "tok/s"

    def room(self, kv_tokens: int) -> int:
        """Return the room for tokens that every engine gets: `kv_tokens`, which serve all cases. Where memory is
        measured it is what the case uses, whatever the other cases are."""
        return self.streams * (self.prompt + self.new_tokens) if self.kind == "memory" else kv_tokens

    def job(self, model: str, threads: int, vocabulary: int, kv_tokens: int) -> Job:
        """Return the work for an engine's process; all engines get the same token ids."""
        chooser = random.Random(f"{self.streams} {self.prompt}")
        last = min(LAST_ID, vocabulary)
        prompts = [
            [chooser.randrange(FIRST_ID, last) for _ in range(self.prompt)] for _ in range(self.streams)
        ]
        once = self.kind in ("start", "memory")
        # A short run needs several for its median; a long one is long enough.
        repeats = 1 if once or self.streams * self.prompt >= LONG else 3
        warmups = 0 if once or self.prompt >= VERY_LONG else 1
        return Job(
            model,
            threads,
            prompts,
            self.new_tokens,
            warmups,
            repeats,
            self.room(kv_tokens),
            wants_memory=self.kind == "memory",
        )

    def figure(self, answer: Answer, spawned_at: float) -> float:
        """Make the figure of what an engine's process has answered; it was started at `spawned_at`."""
        if self.kind == "start":
            return answer.first_token_at - spawned_at
        if self.kind == "memory":
            return float(answer.memory["pss"]) / 2**20
        return statistics.median(self._rate(timing.first, timing.total) for timing in answer.timings)

    def _rate(self, first: float, total: float) -> float:
        if self.kind == "prefill":
            return self.streams * self.prompt / first
        if self.kind == "decode":
            return (self.new_tokens - 1) / (total - first)
        return self.streams * self.new_tokens / total

    def floor(self, costs: ModelCosts, rates: Rates, kv_tokens: int) -> float:
        """Return the figure of a program that costs nothing but what the machine needs for the model."""
        prefill = costs.prefill_seconds(self.prompt, self.streams, rates)
        decode = costs.decode_seconds(self.prompt, self.new_tokens, self.streams, rates)
        if self.kind == "start":
            return costs.file_bytes / rates.read + prefill
        if self.kind == "memory":
            return (costs.file_bytes + self.room(kv_tokens) * costs.kv_values * KV_BYTES) / 2**20
        return self._rate(prefill, prefill + decode)


def cases(quick: bool) -> list[Case]:
    """List the cases; the quick ones have fewer streams and shorter answers."""
    new = 32 if quick else 64
    counts = (1, 8) if quick else (1, 8, 32)
    return [
        Case("decode, context 64", "decode", 1, 64, 2 * new),
        Case("decode, context 2,000", "decode", 1, 2000, new),
        *([] if quick else [Case("decode, context 8,000", "decode", 1, 8000, new)]),
        Case("prefill, 512 tokens", "prefill", 1, 512, 1),
        Case("prefill, 2,000 tokens", "prefill", 1, 2000, 1),
        *(
            Case(f"{count} stream{'s' * (count > 1)}, 128 in, {new} out", "streams", count, 128, new)
            for count in counts
        ),
        Case("from nothing to the first token", "start", 1, START_PROMPT, 1),
        Case(f"resident memory (PSS), {IN_USE:,} tokens of KV", "memory", 1, IN_USE - 64, 64),
    ]


def tokens_needed(chosen: list[Case]) -> int:
    """Return the room for tokens that serves all cases but that of memory: that of the largest, to a power of 2."""
    timed = [case for case in chosen if case.kind != "memory"]
    most = max((case.streams * (case.prompt + case.new_tokens + 16) for case in timed), default=1)
    return 1 << (most - 1).bit_length()
