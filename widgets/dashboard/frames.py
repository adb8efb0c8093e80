"""The frames that the dashboard's kernel side sends to its script in the browser, at most five a second.

A frame is a custom message of the widget: JSON content, with binary buffers beside it. `FrameBuilder` makes
the frames of one widget; a *reset* frame stands by itself, the others say what has changed since the one
before. The script asks for a reset frame, `{"kind": "hello"}`, when it is mounted and when a frame's `seq`
does not follow the last one.

```
{"kind": "frame", "seq": 7, "reset": false, "time": 1700000000.0,
 "engine": {"name", "model", "topology", "device", "dtype", "lock_step", "state", "note"},
 "rates":  {"tokens_in_per_second", "tokens_out_per_second", "time_to_first_token", "inter_token_latency",
            "memory_bytes", "first_token_p95", "first_token_p99", "inter_token_p95", "inter_token_p99"},
                                                     # numbers, or null where nothing is known
 "ranks": [{"rank": 0, "alive": true, "num_running", "num_waiting", "num_preemptions", "num_blocks",
            "num_free_blocks", "num_cached_blocks", "block_size", "num_state_slots", "num_free_state_slots",
            "num_checkpoints", "prefix_cache_queries", "prefix_cache_hits", "step", "wave", "is_paused",
            "sleep_level", "max_num_batched_tokens", "max_num_seqs",
            "workers": [{"rank", "memory_bytes", "num_steps", "step_seconds"}],
            "history_lost": false,                   # true: the steps below do not follow the earlier ones
            "steps": [STEP, ...],                    # new ones, and older ones whose `seconds` are known now
            "requests": null | REQUESTS,             # changes of its part of the table; null: there are none
            "blocks": null | {"buffer": 0, "full": true}}],    # index into the buffers
 "waves": {"reset": true, "spans": [{"start", "end", "rank", "running", "steps", "prefill_steps",
                                     "recompute_steps", "dummy_steps", "wave", "num_requests"}],
           "open": [...]}}                           # the same, of the last second: each frame has all of them
```
STEP is `[step, time, seconds, num_running, num_waiting, num_free_blocks, num_cached_blocks, entries,
preempted, finished]`. `seconds` is null until the step's outcome is known. `entries` is null if the same
requests as in the step before computed a token each and nothing else was done; otherwise it is the flat list
`[number, tokens, kind, cached, ...]`: kind 0 is a decode, 1 a part of a prompt, 2 a part of what a preemption
lost, and `cached` is the prefix hit in tokens if the request was admitted in this step, otherwise -1.
`preempted` and `finished` are lists of numbers, or null. A step is sent again when its `seconds` are known,
or when another request has ended since, as `[step, null, seconds, finished]`, where `finished` is the whole
list or null. A long history comes in several frames, the oldest steps first. Two successive steps of a rank
may have the same number only when `history_lost` lies between them. Texts (ids, names, previews) are cut to
at most 200 characters.

The table of requests has at most 200 rows for all engine cores together, of which 40 have ended: first the
unfinished ones in the order of `added_at`, then those that have ended, the latest `ended_at` first (null
counts as 0); where these are equal, the order is that of rank and number. REQUESTS changes an engine core's
part of the table, in this order:
```
{"gone": [number, ...],                              # these have left the table
 "new": [{"number", "id", "client", "num_prompt_tokens", "max_total_tokens", "added_at", "preview"}],
 "status": [[number, state, num_cached_tokens, num_preemptions, first_token_at, ended_at, finish_reason, own,
             foreground]],
 "progress": [number, num_computed_tokens, num_output_tokens, ...],      # a flat list
 "texts": [[number, newest words of the answer], ...]}
```
A new request replaces one with its number, if there is one. Its status and its progress come in the same
frame, and again when something in them has changed. An engine core that is missing from `ranks` has left with
its requests.

The `steps` of a wave span are own ones: those in which a request read its prompt (`prefill_steps`), those in which one
read again what it had lost (`recompute_steps`), and those that only decoded.

Wave spans are settled after about a second, and do not change after that. The settled spans of a frame are
new ones; with `reset` all earlier ones are void. Those under `open` may still change, and replace the open ones
of the frame before.

A buffer of blocks is little-endian uint32. If it is full, it has one word for each block, otherwise pairs
(block, word). A word has the reference count in bits 0 to 11 (4095: that or more), bit 12 if the block is
cached, and in bits 13 to 31 the number of the request that took the block last, modulo 2**19 - 1, or 2**19 -
1 if none did.

The script sends the kernel `{"kind": "hello"}`, `{"kind": "alive", "visible": true}` every five seconds, which says
whether it can be seen,
`{"kind": "abort", "rank": 0, "number": 12}` (answer: `{"kind": "aborted", "rank", "number", "error": null}`),
`{"kind": "go_on"}`, which wakes a sleeping engine and lifts a pause (answer: `{"kind": "goes_on", "error":
null}`), `{"kind": "block", "rank": 0, "block": 17}` (answer: `{"kind": "block", "rank", "block", "lines":
[str, ...]}`), `{"kind": "export"}` (answer: `{"kind": "export", "name": "trace.json", "text": str}`), and
`{"kind": "history", "last": "1h"}` (or `"1d"`; answer: `nbengine.widgets.dashboard.past`).

Traits that are synchronised beside the messages: `snapshot` is a dict: a reset frame with one more key,
`"buffers"`, a list of its buffers in base64; it is renewed now and then, so that a saved notebook has
something to show, and empty before the first one. `interrupt_path` is `api/kernels/<id>`, or empty if it is
unknown. `height` is in pixels; 0 means as high as the content; the script sets it when the handle is dragged.
`view` is a dict that only the script reads, empty at first: the rank, the pause and the zoom, so that they
are the same when the page is loaded again.

All times are seconds of `time.time()`; a rank's spans come in order and do not overlap. While a widget is
visible, a frame comes at least every five seconds, as an answer to `alive`, even if nothing has changed. Out of
sight frames come every two seconds, so that the script misses nothing. With the state "ended" come no more: the
script says that the kernel does not answer when no frame has come for fifteen seconds, and at once when
nothing can be sent because the kernel was restarted.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from nbengine.client.observe.trace_mirror import BlockMap, TraceMirror
from nbengine.metrics.stats import SchedulerStats
from nbengine.metrics.trace import RequestAdded
from nbengine.widgets.dashboard.request_frames import RequestEncoder, RequestRow, cut, no_words
from nbengine.widgets.dashboard.step_frames import StepEncoder
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed_state import is_blank
from nbengine.widgets.waves.timeline import RankSpan

MOST_REQUESTS = 200
"""The most rows of the table."""
MOST_ENDED = 40
"""The most rows of requests that have ended, among those rows."""
FRAME_BYTES = 60_000
"""The size that a frame may have, roughly, before the rest of its steps waits for the next."""
RESET_BYTES = 240_000
SNAPSHOT_STEP_BYTES = 60_000
LEAST_STEP_BYTES = 8_000
"""The least room for the steps of an engine core, whatever else is in a frame."""
SETTLE_SECONDS = 1.0
"""Seconds after which a wave's span is not changed any more by late reports."""
NOBODY = 2**19 - 1
MOST_REFERENCES = 2**12 - 1

_SAME_TIME = 1e-4
_RANK_BYTES, _SPAN_BYTES, _HEAD_BYTES = 600, 170, 700


@dataclass(frozen=True, slots=True)
class Frame:
    """A message of the protocol above; `size` is roughly its bytes on the wire."""

    content: dict[str, object]
    buffers: list[bytes]
    size: int


@dataclass(slots=True)
class _RankSeen:
    """The state of an engine core as the script has it."""

    requests: RequestEncoder
    steps: StepEncoder = field(default_factory=StepEncoder)
    blocks: ref[BlockMap] | None = None
    """A weak reference: after a pause a mirror has another map, and a silent script must not keep the old."""
    version: int = 0


class FrameBuilder:
    """A maker of the frames of one widget, to be used by one thread at a time.

    Args:
        preview: the end of what a request asks, in words.
        output: the newest words of a request's answer; empty where they are not known.
        clock: in seconds.
    """

    def __init__(
        self,
        preview: Callable[[RequestAdded], str],
        clock: Callable[[], float] = time.monotonic,
        output: Callable[[RequestAdded], str] = no_words,
    ) -> None:
        self._preview = preview
        self._output = output
        self._clock = clock
        self._seq = 0
        self._needs_reset = True
        self._ranks: dict[int, _RankSeen] = {}
        self._spans_until = 0.0
        self._settled_until = 0.0
        self._span_marks: deque[tuple[float, float]] = deque()
        """Pairs of (time, end of the newest span at that time)."""
        self._unsettled: list[dict[str, object]] = []
        self._sent: dict[str, object] = {}

    def snapshot(self, state: DashboardState) -> Frame:
        """Make a frame that stands by itself; where there are many steps, it has only the latest."""
        self.reset()
        self._ranks.clear()
        for rank, mirror in state.mirrors.items():
            seen = self._ranks[rank] = self._unseen()
            seen.steps.skip_to_latest(mirror, SNAPSHOT_STEP_BYTES // len(state.mirrors))
        return self._build(state, is_reset=True, force=True)

    def reset(self) -> None:
        """Let the next frame stand by itself."""
        self._needs_reset = True

    def build(self, state: DashboardState, *, force: bool = False) -> Frame | None:
        """Make the next frame; None if nothing has changed, except with `force` or after a `reset`."""
        if self._needs_reset:
            self._ranks.clear()
        frame = self._build(state, is_reset=self._needs_reset, force=force)
        return frame if frame.content else None

    def _build(self, state: DashboardState, *, is_reset: bool, force: bool) -> Frame:
        """Make the next frame, without content if nothing has changed."""
        self._needs_reset = False
        if is_reset:
            self._spans_until = 0.0
        heads: dict[str, object] = {"engine": _engine(state), "rates": _rates(state)}
        ranks = [_rank(engine, state.mirrors.get(engine.engine_index)) for engine in state.stats.engines]
        now_shown = {**heads, "ranks": [dict(rank) for rank in ranks]}
        has_news = is_reset or force or now_shown != self._sent
        self._sent = now_shown
        present = {engine.engine_index for engine in state.stats.engines}
        self._ranks = {rank: self._ranks.get(rank) or self._unseen() for rank in present}
        spans, unsettled = self._spans(state)
        buffers: list[bytes] = []
        size = _HEAD_BYTES + _RANK_BYTES * len(ranks) + _SPAN_BYTES * (len(spans) + len(unsettled))
        size += self._add_requests(ranks, state)
        for rank in ranks:
            size += self._add_blocks(rank, state.mirrors, buffers)
        room = (RESET_BYTES if is_reset else FRAME_BYTES) - size
        for rank in ranks:
            size += self._add_steps(rank, state.mirrors, max(LEAST_STEP_BYTES, room // len(ranks)))
        has_more = any(rank["steps"] or rank["history_lost"] or rank["requests"] for rank in ranks)
        has_news = has_news or unsettled != self._unsettled
        self._unsettled = unsettled
        if not (has_news or buffers or spans or has_more):
            return Frame({}, [], 0)
        self._seq += 1
        content: dict[str, object] = {
            "kind": "frame",
            "seq": self._seq,
            "reset": is_reset,
            "time": state.time,
            **heads,
            "ranks": ranks,
            "waves": {"reset": is_reset, "spans": spans, "open": unsettled},
        }
        return Frame(content, buffers, size)

    def _unseen(self) -> _RankSeen:
        return _RankSeen(RequestEncoder(self._preview, self._output))

    def _add_requests(self, ranks: Sequence[dict[str, object]], state: DashboardState) -> int:
        rows: defaultdict[int, list[RequestRow]] = defaultdict(list)
        unfinished = sum(len(mirror.requests) for mirror in state.mirrors.values())
        for number, view in state.requests(min(MOST_REQUESTS, unfinished + MOST_ENDED)):
            rows[number].append((view, state.own_requests.get(view.added.request_id)))
        size = 0
        for rank in ranks:
            number = cast("int", rank["rank"])
            requests = self._ranks[number].requests.take(rows[number])
            rank["requests"] = requests.item
            size += requests.size
        return size

    def _add_blocks(
        self, rank: dict[str, object], mirrors: Mapping[int, TraceMirror], buffers: list[bytes]
    ) -> int:
        number = cast("int", rank["rank"])
        mirror = mirrors.get(number)
        rank["blocks"] = None
        if mirror is None or not mirror.blocks.num_blocks:
            return 0
        seen, blocks = self._ranks[number], mirror.blocks
        is_full = seen.blocks is None or seen.blocks() is not blocks
        changed = np.flatnonzero(blocks.version > seen.version)
        # A pair is two words.
        is_full = is_full or 2 * len(changed) >= blocks.num_blocks
        seen.blocks, seen.version = ref(blocks), mirror.version
        if not is_full and not len(changed):
            return 0
        rank["blocks"] = {"buffer": len(buffers), "full": is_full}
        data = block_words(blocks) if is_full else _pairs(changed, block_words(blocks, changed))
        buffers.append(data.tobytes())
        return data.nbytes

    def _add_steps(self, rank: dict[str, object], mirrors: Mapping[int, TraceMirror], room: int) -> int:
        number = cast("int", rank["rank"])
        mirror = mirrors.get(number)
        if mirror is None:
            rank.update(history_lost=False, steps=[])
            return 0
        steps = self._ranks[number].steps.take(mirror, room)
        rank.update(history_lost=steps.lost, steps=steps.items)
        return steps.size

    def _spans(self, state: DashboardState) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        """List the spans that are settled and were not sent yet, and those that are not settled."""
        waves, now = state.waves, self._clock()
        newest = waves.began + waves.seconds
        if not self._span_marks or newest > self._span_marks[-1][1]:
            self._span_marks.append((now, newest))
        while self._span_marks and self._span_marks[0][0] <= now - SETTLE_SECONDS:
            self._settled_until = max(self._settled_until, self._span_marks.popleft()[1])
        settled = newest if state.state == "ended" else self._settled_until
        spans: list[dict[str, object]] = []
        unsettled: list[dict[str, object]] = []
        for span in waves.spans:
            start, end = waves.began + span.start, waves.began + span.end
            if end <= self._spans_until + _SAME_TIME:
                continue
            found = spans if end <= settled + _SAME_TIME else unsettled
            found += [_span(rank, part, start, end) for rank, part in sorted(span.ranks.items())]
        self._spans_until = max(self._spans_until, settled)
        return spans, unsettled


def block_words(blocks: BlockMap, block_ids: NDArray[np.int64] | None = None) -> NDArray[np.uint32]:
    """Pack one word for each block, of all or of `block_ids`, as the protocol has them."""
    chosen: Any = slice(None) if block_ids is None else block_ids
    references = np.minimum(blocks.ref_counts[chosen], MOST_REFERENCES).astype("<u4")
    holders = blocks.holder[chosen]
    numbers = np.where(holders < 0, NOBODY, holders % NOBODY).astype("<u4")
    words: NDArray[np.uint32] = references | blocks.cached[chosen].astype("<u4") << 12 | numbers << 13
    return words


def _pairs(block_ids: NDArray[np.int64], words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.column_stack([block_ids.astype("<u4"), words])


def _engine(state: DashboardState) -> dict[str, object]:
    label = state.label
    return {
        "name": cut(label.name),
        "model": cut(label.model),
        "topology": label.topology,
        "device": label.device,
        "dtype": label.dtype,
        "lock_step": label.lock_step,
        "state": state.state,
        "note": state.note,
    }


def _rates(state: DashboardState) -> dict[str, object]:
    rates = state.rates
    return {
        "tokens_in_per_second": _rounded(rates.tokens_in_per_second, 1),
        "tokens_out_per_second": _rounded(rates.tokens_out_per_second, 1),
        "time_to_first_token": _rounded(rates.time_to_first_token, 6),
        "inter_token_latency": _rounded(rates.inter_token_latency, 6),
        "first_token_p95": _rounded(rates.first_token_tail[0], 6),
        "first_token_p99": _rounded(rates.first_token_tail[1], 6),
        "inter_token_p95": _rounded(rates.inter_token_tail[0], 6),
        "inter_token_p99": _rounded(rates.inter_token_tail[1], 6),
        "memory_bytes": rates.memory_bytes,
    }


def _rank(engine: SchedulerStats, mirror: TraceMirror | None) -> dict[str, object]:
    known = None if mirror is None or not mirror.num_snapshots else mirror
    return {
        "rank": engine.engine_index,
        "alive": not is_blank(engine),
        "num_running": engine.num_running_reqs,
        "num_waiting": engine.num_waiting_reqs,
        "num_preemptions": engine.num_preemptions,
        "num_blocks": engine.num_blocks,
        "num_free_blocks": engine.num_free_blocks,
        "num_cached_blocks": engine.num_cached_blocks,
        "block_size": None if known is None else known.blocks.block_size,
        "num_state_slots": engine.num_state_slots,
        "num_free_state_slots": engine.num_free_state_slots,
        "num_checkpoints": engine.num_checkpoints,
        "prefix_cache_queries": engine.prefix_cache_queries,
        "prefix_cache_hits": engine.prefix_cache_hits,
        "step": engine.step_counter,
        "wave": engine.current_wave,
        "is_paused": engine.is_paused,
        "sleep_level": engine.sleep_level,
        "max_num_batched_tokens": None if known is None else known.max_num_batched_tokens,
        "max_num_seqs": None if known is None else known.max_num_seqs,
        "workers": [
            {
                "rank": worker.rank,
                "memory_bytes": worker.memory_bytes,
                "num_steps": worker.num_steps,
                "step_seconds": round(worker.step_seconds, 6),
            }
            for worker in engine.workers
        ],
    }


def _span(rank: int, part: RankSpan, start: float, end: float) -> dict[str, object]:
    _, reading, again, dummy = part.by_phase
    return {
        "start": round(start, 4),
        "end": round(end, 4),
        "rank": rank,
        "running": part.is_running,
        "steps": round(part.steps, 2),
        "prefill_steps": round(reading, 2),
        "recompute_steps": round(again, 2),
        "dummy_steps": round(dummy, 2),
        "wave": part.wave,
        "num_requests": part.num_requests,
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
