"""A small engine that schedules and caches as a real one does, and tells of it in the dashboard's frames."""

from __future__ import annotations

import base64
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Frame = tuple[dict[str, Any], list[bytes]]
NUMBERS = 2**19 - 1
START = 1_700_000_000.0


@dataclass(eq=False)
class Request:
    number: int
    id: str
    prompt: int
    most: int
    group: int
    added_at: float
    preview: str
    own: bool
    foreground: bool = False
    state: str = "waiting"
    computed: int = 0
    output: int = 0
    hit: int = -1
    lost: int = 0
    preemptions: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
    reason: str | None = None
    blocks: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        return self.prompt + self.output


class Rank:
    """One engine core."""

    def __init__(self, rank: int, num_blocks: int, budget: int, seqs: int, seed: int) -> None:
        self.rank, self.budget, self.seqs, self.block_size = rank, budget, seqs, 16
        self.references = np.zeros(num_blocks, np.int64)
        self.cached = np.zeros(num_blocks, bool)
        self.holder = np.full(num_blocks, NUMBERS, np.int64)
        self.free = deque(range(num_blocks))
        self.prefixes: dict[int, list[int]] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: deque[Request] = deque(maxlen=100)
        self.numbers = self.step_number = self.preemptions = self.queries = self.hits = self.wave = 0
        self.now = START
        self.steps: list[list[Any]] = []
        self.late: list[Any] | None = None
        self.all_steps: deque[list[Any]] = deque(maxlen=10_000)
        self.spans: list[dict[str, Any]] = []
        self.last_decodes: list[int] | None = None
        self.sent = np.zeros(num_blocks, np.uint32)
        self.sent_rows: dict[int, dict[str, Any]] = {}
        self.random = random.Random(seed)

    def add(self, prompt: int, output: int, group: int = -1, **how: Any) -> Request:
        number = self.numbers
        self.numbers += 1
        fields = {"id": f"cmpl-{number:04d}-{self.random.randrange(16**8):08x}", "own": number % 3 != 2}
        fields |= {"preview": f"Tell me about number {number}, and be brief"} | how
        request = Request(number, prompt=prompt, most=output, group=group, added_at=self.now, **fields)
        self.waiting.append(request)
        return request

    def words(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        words = np.minimum(self.references, 4095) | self.cached.astype(np.int64) << 12 | self.holder << 13
        return words.astype(np.uint32)

    def step(self) -> None:
        """Plan and finish one step; nothing happens without requests."""
        if not (self.waiting or self.running):
            self.now += 0.05
            return
        budget, entries, preempted = self.budget, [], []
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            tokens = min(budget, request.known - request.computed)
            while request in self.running and not self.allocate(request, request.computed + tokens):
                preempted.append(self.preempt(self.running[-1]))
            if request in self.running:
                entries.append(self.compute(request, tokens, -1))
                budget -= tokens
        gone = set(preempted)
        entries = [entry for entry in entries if entry[0] not in gone]
        while self.waiting and len(self.running) < self.seqs and budget > 0 and not preempted:
            request = self.waiting[0]
            hit = self.look_up(request)
            tokens = min(budget, request.known - hit)
            if not self.allocate(request, hit + tokens):
                self.release(request)
                break
            self.waiting.popleft()
            self.running.append(request)
            request.state, request.computed = "running", hit
            first = request.hit < 0
            request.hit = hit if first else request.hit
            self.queries += request.prompt
            self.hits += hit
            entries.append(self.compute(request, tokens, hit))
            budget -= tokens
        self.record(entries, preempted)

    def compute(self, request: Request, tokens: int, hit: int) -> list[int]:
        kind = 0 if tokens == 1 and request.output else 2 if request.computed < request.lost else 1
        request.computed += tokens
        return [request.number, tokens, kind, hit]

    def record(self, entries: list[list[int]], preempted: list[int]) -> None:
        tokens = sum(entry[1] for entry in entries)
        seconds = 0.004 + tokens * 2e-5
        self.step_number += 1
        planned, self.now = self.now, self.now + seconds
        counts = [len(self.running), len(self.waiting), self.num_free, int(self.cached.sum())]
        finished = [request.number for request in list(self.running) if self.sample(request)]
        decodes = [entry[0] for entry in entries] if all(e[1:] == [1, 0, -1] for e in entries) else None
        same = decodes is not None and decodes == self.last_decodes and not preempted
        self.last_decodes = [entry[0] for entry in entries]
        flat = None if same else [value for entry in entries for value in entry]
        step = [self.step_number, planned, seconds, *counts, flat, preempted or None, finished or None]
        self.steps.append(step)
        self.all_steps.append([*step[:7], [v for e in entries for v in e], *step[8:]])

    def sample(self, request: Request) -> bool:
        """Take a token in; whether it was the last."""
        if request.computed < request.known:
            return False
        self.cache(request)
        request.output += 1
        request.first_token_at = request.first_token_at or self.now
        if request.output < request.most:
            return False
        self.end(request, "length")
        return True

    def end(self, request: Request, reason: str) -> None:
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.release(request)
        request.state, request.reason, request.ended_at = "finished", reason, self.now
        self.ended.appendleft(request)

    def preempt(self, request: Request) -> int:
        self.running.remove(request)
        self.release(request)
        request.lost, request.computed, request.state = request.computed, 0, "preempted"
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
        return request.number

    @property
    def num_free(self) -> int:
        return int((self.references == 0).sum())

    def allocate(self, request: Request, tokens: int) -> bool:
        missing = -(-tokens // self.block_size) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            block = self.free.popleft()
            if self.cached[block]:
                self.cached[block] = False
                self.prefixes = {g: blocks for g, blocks in self.prefixes.items() if block not in blocks}
            self.references[block], self.holder[block] = 1, request.number % NUMBERS
            request.blocks.append(block)
        return True

    def look_up(self, request: Request) -> int:
        for block in self.prefixes.get(request.group, [])[: (request.known - 1) // self.block_size]:
            if self.references[block] == 0:
                self.free.remove(block)
            self.references[block] += 1
            self.holder[block] = request.number % NUMBERS
            request.blocks.append(block)
        return len(request.blocks) * self.block_size

    def cache(self, request: Request) -> None:
        full = request.blocks[: request.computed // self.block_size]
        self.cached[full] = True
        if request.group >= 0 and request.group not in self.prefixes:
            self.prefixes[request.group] = full[: min(12, request.prompt // self.block_size)]

    def release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
        request.blocks.clear()


UNCHANGING = ("number", "id", "client", "num_prompt_tokens", "max_total_tokens", "added_at", "preview")
STATUS = ("number", "state", "num_cached_tokens", "num_preemptions", "first_token_at", "ended_at")
STATUS += ("finish_reason", "own", "foreground")
PROGRESS = ("number", "num_computed_tokens", "num_output_tokens")


def table_change(before: dict[int, dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Make the change that turns the rows of an engine core, by number, into these."""
    old = {number: tuple(part(row, names) for names in (STATUS, PROGRESS)) for number, row in before.items()}
    never = (None, None)
    return {
        "gone": sorted(before.keys() - {row["number"] for row in rows}),
        "new": [{name: row[name] for name in UNCHANGING} for row in rows if row["number"] not in before],
        "status": [
            part(row, STATUS) for row in rows if part(row, STATUS) != old.get(row["number"], never)[0]
        ],
        "progress": [
            value
            for row in rows
            if part(row, PROGRESS) != old.get(row["number"], never)[1]
            for value in part(row, PROGRESS)
        ],
        "texts": [
            [row["number"], row["text"]]
            for row in rows
            if row.get("text", "") != before.get(row["number"], {}).get("text", "")
        ],
    }


def part(row: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """Return some of a row's fields."""
    return [row[name] for name in names]


class FakeEngine:
    """Ranks of it and the frames that tell of them. With `is_computing` the newest step's outcome comes a frame later."""

    def __init__(
        self,
        ranks: int = 1,
        num_blocks: int = 640,
        budget: int = 512,
        seqs: int = 24,
        lock_step: bool = False,
        is_computing: bool = False,
        seed: int = 7,
    ) -> None:
        self.is_computing = is_computing
        self.ranks = [Rank(rank, num_blocks, budget, seqs, seed + rank) for rank in range(ranks)]
        self.lock_step, self.random, self.seq = lock_step, random.Random(seed), 0
        self.state, self.note = "running", ""
        self.span_start = START
        self.all_spans: list[dict[str, Any]] = []

    def run(self, steps: int, arrivals: float = 0.15) -> None:
        """Make `steps` steps on every rank; new requests come with a chance of `arrivals` a step."""
        for _ in range(steps):
            for rank in self.ranks:
                if self.random.random() < arrivals:
                    rank.add(
                        self.random.choice((40, 90, 250, 700)),
                        self.random.choice((30, 60, 150)),
                        self.random.choice((-1, 0, 0, 1)),
                        foreground=self.random.random() < 0.3,
                    )
                rank.step()
            now = max(rank.now for rank in self.ranks)
            for rank in self.ranks:
                rank.now = max(rank.now, now - 0.02)

    def frame(self, reset: bool = False) -> Frame:
        """The next frame."""
        self.seq += 1
        buffers: list[bytes] = []
        ranks = [self.rank_part(rank, reset, buffers) for rank in self.ranks]
        now = max(rank.now for rank in self.ranks)
        spans = self.new_spans(now)
        waves = {"reset": reset, "spans": self.all_spans if reset else spans}
        content = {
            "kind": "frame",
            "seq": self.seq,
            "reset": reset,
            "time": now,
            "engine": {
                "name": "engine-1",
                "model": "smollm2-135m",
                "topology": f"DP {len(self.ranks)}" if len(self.ranks) > 1 else "1 engine core",
                "device": "cpu",
                "dtype": "bfloat16",
                "lock_step": self.lock_step,
                "state": self.state,
                "note": self.note,
            },
            "rates": {
                "tokens_in_per_second": 1234.5,
                "tokens_out_per_second": 412.25,
                "time_to_first_token": 0.0312,
                "inter_token_latency": 0.00781,
                "memory_bytes": 734003200,
            },
            "ranks": ranks,
            "waves": waves,
        }
        return content, buffers

    def snapshot(self) -> dict[str, Any]:
        """A reset frame as it is kept in a notebook."""
        content, buffers = self.frame(reset=True)
        return content | {"buffers": [base64.b64encode(buffer).decode() for buffer in buffers]}

    def requests_part(self, rank: Rank, reset: bool) -> dict[str, Any]:
        before = {} if reset else rank.sent_rows
        rank.sent_rows = {
            request.number: self.row(request) for request in [*rank.running, *rank.waiting, *rank.ended]
        }
        return table_change(before, list(rank.sent_rows.values()))

    def row(self, request: Request) -> dict[str, Any]:
        return {
            "number": request.number,
            "id": request.id,
            "client": 0 if request.own else 1,
            "state": request.state,
            "num_prompt_tokens": request.prompt,
            "num_cached_tokens": request.hit,
            "num_computed_tokens": request.computed,
            "num_output_tokens": request.output,
            "max_total_tokens": request.prompt + request.most,
            "num_preemptions": request.preemptions,
            "added_at": request.added_at,
            "first_token_at": request.first_token_at,
            "ended_at": request.ended_at,
            "finish_reason": request.reason,
            "own": request.own,
            "foreground": request.foreground,
            "preview": request.preview,
        }

    def steps_part(self, rank: Rank, reset: bool) -> list[list[Any]]:
        steps, late = rank.steps, rank.late
        rank.steps, rank.late = [], None
        if reset:
            return list(rank.all_steps)
        if self.is_computing and steps:
            rank.late = steps[-1]
            steps = [*steps[:-1], [*rank.late[:2], None, *rank.late[3:9], None]]
        return steps if late is None else [[late[0], None, late[2], late[9]], *steps]

    def rank_part(self, rank: Rank, reset: bool, buffers: list[bytes]) -> dict[str, Any]:
        words = rank.words()
        changed = np.flatnonzero(words != rank.sent).astype(np.uint32)
        blocks = None
        if reset or len(changed):
            blocks = {"buffer": len(buffers), "full": reset}
            pairs = np.stack([changed, words[changed]], 1)
            buffers.append((words if reset else pairs).astype("<u4").tobytes())
        rank.sent = words
        return {
            "rank": rank.rank,
            "alive": True,
            "num_running": len(rank.running),
            "num_waiting": len(rank.waiting),
            "num_preemptions": rank.preemptions,
            "num_blocks": len(words),
            "num_free_blocks": rank.num_free,
            "num_cached_blocks": int(rank.cached.sum()),
            "block_size": rank.block_size,
            "num_state_slots": 0,
            "num_free_state_slots": 0,
            "num_checkpoints": 0,
            "prefix_cache_queries": rank.queries,
            "prefix_cache_hits": rank.hits,
            "step": rank.step_number,
            "wave": rank.wave,
            "is_paused": False,
            "sleep_level": 0,
            "max_num_batched_tokens": rank.budget,
            "max_num_seqs": rank.seqs,
            "workers": [
                {"rank": 0, "memory_bytes": 734003200, "num_steps": rank.step_number, "step_seconds": 0.01}
            ],
            "history_lost": False,
            "steps": self.steps_part(rank, reset),
            "requests": self.requests_part(rank, reset),
            "blocks": blocks,
        }

    def new_spans(self, now: float) -> list[dict[str, Any]]:
        if len(self.ranks) < 2 and not self.lock_step:
            return []
        is_running = any(rank.running or rank.waiting for rank in self.ranks)
        spans = []
        for rank in self.ranks:
            own = bool(rank.running or rank.waiting)
            spans.append(
                {
                    "start": self.span_start,
                    "end": now,
                    "rank": rank.rank,
                    "running": is_running if self.lock_step else own,
                    "steps": 8.0 if own else 0.0,
                    "prefill_steps": 0.0,
                    "recompute_steps": 0.0,
                    "dummy_steps": 0.0 if own or not (self.lock_step and is_running) else 8.0,
                    "wave": rank.wave,
                    "num_requests": len(rank.running) + len(rank.waiting),
                }
            )
        self.span_start = now
        self.all_spans += spans
        return spans


def kept_hour(end: float) -> Frame:
    """The answer about an hour that ends at a time: loads that come and go, and a time of which nothing is known."""
    slices = range(360)
    loads = [None if 200 <= at < 230 else max(0, 40 - abs(at % 120 - 60)) for at in slices]

    def column(scale: float) -> list[float | None]:
        return [None if load is None else scale * load for load in loads]

    rates = {"tokens_per_second": 50, "prompt_tokens_per_second": 200, "running": 2, "waiting": 1}
    rates |= {"ttft_p50": 0.01, "ttft_p95": 0.02, "ttft_p99": 0.03, "itl_p50": 0.001, "itl_p95": 0.002}
    rates |= {"itl_p99": 0.003, "kv_usage": 0.02, "preemptions": 0.1}
    rates |= {"prefix_cache_queries": 100, "prefix_cache_hits": 30}
    columns = {name: column(scale) for name, scale in rates.items()}
    rank = {"rank": 0, "seconds": 10.0, "gap": [int(load is None) for load in loads], **columns}
    return {
        "kind": "history",
        "last": "1h",
        "error": None,
        "begin": end - 3600,
        "end": end,
        "ranks": [rank],
    }, []
