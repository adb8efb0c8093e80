"""Measure what the history that a host keeps adds to a report of an engine core.

    python benchmarks/bench_history.py [--json PATH] [--rates 50 200 1000] [--seconds 60]

A `DPCoordinator` takes in the encoded reports of one engine core over virtual seconds, in turn with its history and
with one that is deaf. Each report has further tokens; a tenth of them, as an engine core sends them, have the figures
of requests, too. Processor time, in microseconds a report; the share is of one core, at that rate of reports.
"""

from __future__ import annotations

import copy
import statistics
from time import process_time
from typing import Any
from unittest import mock

from common import alternate, parser, report

from nbengine.engine.host.coordinator import DPCoordinator
from nbengine.engine.host.history import HostHistory
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.metrics.requests import RequestStats
from nbengine.metrics.stats import SchedulerStats

TOKENS = 32
"""Tokens between two reports."""


def reports(number: int) -> list[list[Any]]:
    """Encode the reports of an engine core with 32 requests, of which one ends between two reports."""
    encoder = MsgpackEncoder()
    requests = RequestStats()
    frames = []
    for index in range(number):
        requests.time_to_first_token.observe(0.01 + index % 7 / 10)
        requests.inter_token_latency.observe(0.005 + index % 5 / 100, TOKENS)
        stats = SchedulerStats(
            num_running_reqs=32,
            num_blocks=4096,
            num_free_blocks=2048 - index % 512,
            step_counter=index,
            num_generation_tokens=TOKENS * index,
            num_prompt_tokens=128 * index,
            requests=copy.deepcopy(requests) if index % 10 == 0 else None,
        )
        frames.append([bytes(frame) for frame in encoder.encode(EngineCoreOutputs(scheduler_stats=stats))])
    return frames


def take_in(frames: list[list[Any]], rate: int) -> float:
    """Take in reports at a rate, and return the microseconds of each."""
    decoder = MsgpackDecoder(EngineCoreOutputs)
    coordinator = DPCoordinator(1)
    begin = process_time()
    for index, report_frames in enumerate(frames):
        coordinator.observe(decoder.decode(report_frames), index / rate)
    return (process_time() - begin) / len(frames) * 1e6


def hear_nothing(history: HostHistory, rank: int, stats: SchedulerStats, now: float) -> None:
    """Stand in for `HostHistory.observe`."""


def deaf(frames: list[list[Any]], rate: int) -> float:
    """Do the same without the history."""
    # A mock would cost more than the history.
    with mock.patch.object(HostHistory, "observe", hear_nothing):
        return take_in(frames, rate)


def main() -> None:
    """Measure one row for each rate."""
    options = parser(__doc__)
    options.add_argument("--rates", type=int, nargs="+", default=[50, 200, 1000], help="reports a second")
    options.add_argument("--seconds", type=int, default=60, help="virtual seconds of a round")
    arguments = options.parse_args()
    rows = []
    for rate in arguments.rates:
        frames = reports(rate * arguments.seconds)
        kept, without = alternate(
            arguments.rounds,
            lambda frames=frames, rate=rate: take_in(frames, rate),
            lambda frames=frames, rate=rate: deaf(frames, rate),
        )
        added = statistics.median(a - b for a, b in zip(kept, without, strict=True))
        rows.append(
            {
                "reports a second": rate,
                "µs without history": round(statistics.median(without), 2),
                "µs added": round(added, 2),
                "% of a core": round(added * rate / 1e4, 3),
            }
        )
    report("history of the host", rows, arguments.json)


if __name__ == "__main__":
    main()
