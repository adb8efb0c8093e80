"""A subscriber to the trace with a mirror of each engine core, checked at every message against the statistics in it."""

from __future__ import annotations

import time
from collections.abc import Callable

from process_support.raw_client import DEADLINE

from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.metrics.trace import TraceBatch, TraceSnapshot


class TraceFollower:
    def __init__(self, subscriber: StatsSubscriber) -> None:
        self.subscriber = subscriber
        self.mirrors: dict[int, TraceMirror] = {}
        self.num_batches = 0

    def take(self, message: object) -> None:
        if not isinstance(message, TraceBatch | TraceSnapshot):
            return
        self.num_batches += isinstance(message, TraceBatch)
        mirror = self.mirrors.setdefault(message.engine_index, TraceMirror(message.engine_index))
        assert mirror.apply(message), "the subscriber let a gap through"
        check_agreement(mirror)

    def poll(self, seconds: float = 0.05) -> None:
        self.take(self.subscriber.poll(seconds))

    def read_until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {DEADLINE} s"
            self.poll()

    def begin(self, rank: int = 0) -> TraceMirror:
        """Wait for an engine core's first snapshot."""
        self.read_until(lambda: rank in self.mirrors, f"a snapshot of engine core {rank}")
        return self.mirrors[rank]


def check_agreement(mirror: TraceMirror) -> None:
    """Check that the mirror makes of the events what the engine core says of itself at the same moment."""
    stats, blocks = mirror.stats, mirror.blocks
    states = [view.state for view in mirror.requests.values()]
    assert states.count("running") == stats.num_running_reqs
    assert len(states) - states.count("running") == stats.num_waiting_reqs
    assert blocks.num_blocks == stats.num_blocks
    assert blocks.num_free_blocks == stats.num_free_blocks
    assert blocks.num_cached_blocks == stats.num_cached_blocks
    tables = [block for view in mirror.requests.values() for block in view.block_ids]
    assert int(blocks.ref_counts.sum()) == len(tables)
    assert set(blocks.ref_counts.nonzero()[0].tolist()) == set(tables)
