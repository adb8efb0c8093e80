"""A simulation whose scheduler is followed: what mirrors must know, taken from the scheduler itself and its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import msgspec

from nbengine.client.observe.trace_mirror import RequestView, StepView, TraceMirror
from nbengine.ipc.messages import EngineCoreOutput
from nbengine.metrics.trace import TraceBatch, TraceMessage, TraceSnapshot
from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.scheduler import Scheduler
from nbengine.scheduler.trace_stream import TraceStream
from tests.unit.scheduler.reference import Limits
from tests.unit.scheduler.simulation import Simulation

RECENT = 30
"""Steps that are looked at after each message; an outcome comes fewer steps later than that."""
STATES = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
}
_decoder: msgspec.msgpack.Decoder[TraceMessage] = msgspec.msgpack.Decoder(TraceBatch | TraceSnapshot)


def over_the_wire(message: TraceMessage) -> TraceMessage:
    return _decoder.decode(msgspec.msgpack.encode(message))


@dataclass
class StepTruth:
    """The truth about a step, from its plan, the scheduler after it, and the outputs."""

    entries: list[tuple[int, int, int]]
    """(number, tokens, computed before)."""
    admitted: list[int]
    resumed: list[int]
    preempted: set[int]
    num_prefill_tokens: int
    gauges: tuple[int, int, int, int]
    """Running, waiting, free blocks, cached blocks."""
    num_sampled: int | None = None

    @property
    def is_visible(self) -> bool:
        """Return whether followers hear of the step: something was computed, or somebody lost blocks."""
        return bool(self.entries or self.preempted)


class TracedSimulation(Simulation):
    """A history with any number of followers."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.stream = TraceStream(self.scheduler, self._tick)
        self.mirrors: list[TraceMirror] = []
        self.truths: dict[int, StepTruth] = {}
        self.reasons: dict[int, str] = {}
        self.first_tokens: dict[int, tuple[float, float]] = {}
        """By number: before and after the call in which a request got its first token."""
        self.ends: dict[int, tuple[float, float]] = {}
        """The same of the token that ended it."""
        self._told_since: dict[TraceMirror, float] = {}
        """The times at which each mirror got its latest snapshot."""
        self.contents: dict[bytes, list[int]] = {}
        """Tokens by hash."""
        self._unheard_of: set[bytes] = set()
        """Blocks that nobody held when the recording began: nobody can tell their tokens."""
        self._highest: dict[int, int] = {}
        """Tokens of each request that have ever been computed."""

    # Following.

    def subscribe(self) -> TraceMirror:
        if self.scheduler.observer is None:
            held = self._held()
            cached = self.scheduler.kv_cache_manager.block_pool.cached_blocks()
            self._unheard_of = {block_hash for block_hash, block in cached.items() if block not in held}
        self.stream.record(True)
        mirror = TraceMirror(0)
        self.mirrors.append(mirror)
        for message in self.stream.snapshot(self._tick(), self.scheduler.make_stats()):
            for other in self.mirrors:
                self._take(other, over_the_wire(message))
        for other in self.mirrors:
            self.compare(other)
        blocks, held = mirror.blocks, sorted(self._held())
        assert (blocks.token_ids[held][blocks.cached[held]] >= 0).all()
        return mirror

    def unsubscribe_all(self) -> None:
        """Record nothing until the next follower comes; then those that were there start again as well."""
        self.stream.record(False)
        assert not self.stream.has_events
        assert self.scheduler.observer is None

    def publish(self, lost_to: int | None = None) -> None:
        """Send what has happened; the mirror of this index does not get it."""
        had_events = self.stream.has_events
        batch = self.stream.take_batch(self._tick(), self.scheduler.make_stats())
        assert had_events == (batch is not None)
        if batch is None:
            return
        received = over_the_wire(batch)
        for index, mirror in enumerate(self.mirrors):
            if index != lost_to:
                self._apply(mirror, received)
        for index, mirror in enumerate(self.mirrors):
            if index != lost_to:
                self.compare(mirror)

    def _apply(self, mirror: TraceMirror, message: TraceMessage) -> None:
        if not self._take(mirror, message):
            assert mirror.seq is None
            snapshots = list(self.stream.snapshot(self._tick(), self.scheduler.make_stats()))
            assert len(snapshots) == 1, "nothing has happened since the batch"
            assert self._take(mirror, over_the_wire(snapshots[0]))

    def _take(self, mirror: TraceMirror, message: TraceMessage) -> bool:
        num_snapshots = mirror.num_snapshots
        could_apply = mirror.apply(message)
        if mirror.num_snapshots > num_snapshots:
            self._told_since[mirror] = message.time
        return could_apply

    # The truth, noted as it happens.

    def schedule(self) -> SchedulerOutput:
        numbers = {r.request_id: r.number for r in self.scheduler.requests.values()}
        highest = self._highest.copy()
        plan = super().schedule()
        requests = self.scheduler.requests
        cached = plan.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
        new = {new.req_id for new in plan.scheduled_new_reqs}
        entries, num_prefill = [], 0
        for name, count in plan.num_scheduled_tokens.items():
            number, start = numbers[name], starts[name]
            entries.append((number, count, start))
            if name in cached.resumed_req_ids and self.limits.lookahead:
                # Which drafts were accepted is known by now: all but the last of its tokens had been computed.
                self._highest[number] = highest[number] = requests[name].num_tokens - 1
            end = max(requests[name].num_prompt_tokens, highest.get(number, 0))
            num_prefill += max(0, min(start + count, end) - start)
        self.truths[plan.step] = StepTruth(
            entries,
            [numbers[name] for name in plan.num_scheduled_tokens if name in new | cached.resumed_req_ids],
            [numbers[name] for name in plan.num_scheduled_tokens if name in cached.resumed_req_ids],
            {numbers[name] for name in plan.preempted_req_ids},
            num_prefill,
            self._gauges(),
        )
        return plan

    def update(self) -> dict[str, EngineCoreOutput]:
        plan = self.in_flight[0].plan
        names = {r.request_id: r.number for r in self.scheduler.requests.values()}
        before = self.now
        got = super().update()
        truth = self.truths[plan.step]
        truth.num_sampled = sum(len(item.new_token_ids) for item in got.values())
        for name, item in got.items():
            if item.new_token_ids:
                self.first_tokens.setdefault(names[name], (before, self.now))
            if item.finish_reason is not None:
                self.reasons[names[name]] = str(item.finish_reason)
                self.ends[names[name]] = before, self.now
        return got

    def _held(self) -> set[int]:
        return {block for request in self.scheduler.running for block in request.block_ids}

    def _gauges(self) -> tuple[int, int, int, int]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return (
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            pool.num_free_blocks,
            pool.num_cached_blocks,
        )

    def check(self) -> None:
        super().check()
        size = self.limits.block_size
        for request in self.scheduler.requests.values():
            for index, block_hash in enumerate(request.block_hashes):
                self.contents[block_hash] = request.all_token_ids[index * size : (index + 1) * size]
            if not self.limits.lookahead:
                computed = max(request.num_computed_tokens, self._highest.get(request.number, 0))
                self._highest[request.number] = computed

    def take_unbegun(self) -> None:
        expected = {r.request_id for r in self.scheduler.waiting if not r.num_output_tokens}
        taken = {name for names in self.scheduler.take_unbegun().values() for name in names}
        assert taken == expected
        for name in taken:
            self.reference.finish(name)
            answer = self._forget(name)
            assert answer is not None
            answer.goes_on = True
        self.check()

    # What a mirror must know.

    def compare(self, mirror: TraceMirror) -> None:
        """Compare all of the mirror's state, after the latest message."""
        scheduler, stats = self.scheduler, self.scheduler.make_stats()
        # A step in which nothing happens is not published.
        assert mirror.stats.step_counter <= stats.step_counter
        assert msgspec.structs.replace(mirror.stats, step_counter=stats.step_counter) == stats
        compare_blocks(mirror, scheduler)
        by_number = {request.number: request for request in scheduler.requests.values()}
        assert list(mirror.requests) == sorted(by_number)
        for number, view in mirror.requests.items():
            compare_request(view, by_number[number])
        states = [view.state for view in mirror.requests.values()]
        assert states.count("running") == stats.num_running_reqs
        assert len(states) - states.count("running") == stats.num_waiting_reqs
        self._compare_tokens(mirror)
        self.compare_steps(list(mirror.steps)[-RECENT:])
        if mirror.num_snapshots == 1:
            for step in list(mirror.steps)[1:][-RECENT:]:
                assert set(step.preempted) >= self.truths[step.step].preempted
        for number, view in mirror.finished.items():
            assert view.state == "finished"
            assert view.finish_reason in (self.reasons.get(number, "abort"), None)
        self._compare_times(mirror)

    def _compare_times(self, mirror: TraceMirror) -> None:
        """Check that a time is told while it is now, or never."""
        since = self._told_since[mirror]
        for number, view in {**mirror.finished, **mirror.requests}.items():
            before, after = self.first_tokens.get(number, (inf, inf))
            if view.first_token_at is None:
                assert after <= since or after == inf
            else:
                assert before < view.first_token_at <= after
            if view.ended_at is not None and number in self.ends:
                before, after = self.ends[number]
                assert before < view.ended_at <= after

    def _compare_tokens(self, mirror: TraceMirror) -> None:
        cached = self.scheduler.kv_cache_manager.block_pool.cached_blocks()
        for block_hash, block_id in cached.items():
            row = mirror.blocks.token_ids[block_id].tolist()
            is_unknown = row == [-1] * self.limits.block_size
            # The keys of all groups but the first end with the group's number.
            assert row == self.contents[block_hash[:32]] or (is_unknown and block_hash in self._unheard_of)
        uncached = set(range(self.limits.num_blocks)) - set(cached.values())
        assert (mirror.blocks.token_ids[sorted(uncached)] == -1).all()

    def compare_steps(self, steps: Iterable[StepView]) -> None:
        for step in steps:
            self._compare_step(step)

    def _compare_step(self, step: StepView) -> None:
        truth = self.truths[step.step]
        assert list(zip(step.numbers, step.num_tokens, step.num_computed, strict=True)) == truth.entries
        assert list(step.admitted) == truth.admitted
        assert list(step.resumed) == truth.resumed
        gauges = (step.num_running, step.num_waiting, step.num_free_blocks, step.num_cached_blocks)
        assert gauges == truth.gauges
        assert step.num_prefill_tokens == truth.num_prefill_tokens
        total = sum(count for _, count, _ in truth.entries)
        assert step.num_decode_tokens == total - truth.num_prefill_tokens
        assert bool(step.prefills) == (truth.num_prefill_tokens > 0)
        if step.seconds is not None:
            assert step.num_sampled == truth.num_sampled


def compare_blocks(mirror: TraceMirror, scheduler: Scheduler) -> None:
    """Compare reference counts, tables, and what can be found."""
    blocks, pool = mirror.blocks, scheduler.kv_cache_manager.block_pool
    assert blocks.num_blocks == pool.num_blocks
    assert blocks.ref_counts.tolist() == [pool.ref_count(b) for b in range(pool.num_blocks)]
    assert set(blocks.cached.nonzero()[0].tolist()) == set(pool.cached_blocks().values())
    stats = mirror.stats
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (
        stats.num_free_blocks,
        stats.num_cached_blocks,
    )
    for block_id in blocks.ref_counts.nonzero()[0].tolist():
        holders = mirror.holders(block_id)
        assert len(holders) == blocks.ref_counts[block_id]
        taker = int(blocks.holder[block_id])
        if taker in holders:
            assert mirror.requests[taker].block_ids[blocks.position[block_id]] == block_id


def compare_request(view: RequestView, request: Request) -> None:
    """Compare one unfinished request."""
    assert view.state == STATES[request.status]
    assert view.block_ids == request.block_ids
    assert view.num_computed_tokens == request.num_computed_tokens
    assert view.num_output_tokens == request.num_output_tokens
    assert view.num_cached_tokens == request.num_cached_tokens
    assert view.num_preemptions == request.num_preemptions
    added = view.added
    assert (added.request_id, added.client_index) == (request.request_id, request.client_index)
    assert (added.num_prompt_tokens, added.max_total_tokens) == (
        request.num_prompt_tokens,
        request.max_total_tokens,
    )
    assert added.prompt_token_ids == (request.prompt_token_ids[:64] if request.prompt_embeds is None else [])
    assert added.priority == request.priority
