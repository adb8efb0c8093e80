"""The frame of the benchmarks of recurrent layers: cases, our steps' metadata, and two sides in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from common import alternate, median_ratio, parser, report

from nbengine.kernels.dispatch import RecurrentKernels
from nbengine.kernels.recurrent_metadata import RecurrentMetadata, build_recurrent_metadata

CPU = torch.device("cpu")
Step = Callable[[], None]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """A batch of equal requests."""

    name: str
    batch: int
    tokens: int

    def metadata(self, kernels: RecurrentKernels) -> RecurrentMetadata:
        """Build the metadata of a step in which every request goes on in its slot."""
        slots = np.arange(self.batch, dtype=np.int32)
        counts = np.full(self.batch, self.tokens, np.int32)
        return build_recurrent_metadata(
            counts, slots, slots, num_slots=self.batch, kernels=kernels, device=CPU
        )


AnyCase = TypeVar("AnyCase", bound=Case)


def _milliseconds(step: Step, clock: Clock) -> float:
    start = clock()
    step()
    return (clock() - start) * 1e3


def _measure(case: Case, sides: tuple[Step, Step], rounds: int, clock: Clock) -> dict[str, Any]:
    ours, theirs = sides
    our_times, their_times = alternate(
        rounds, lambda: _milliseconds(ours, clock), lambda: _milliseconds(theirs, clock)
    )
    return {
        "case": case.name,
        "nbengine ms": statistics.median(our_times),
        "min": min(our_times),
        "transformers ms": statistics.median(their_times),
        "transformers min": min(their_times),
        "speed-up (median ratio)": 1 / median_ratio(our_times, their_times),
    }


def run(
    description: str | None,
    title: str,
    cases: Sequence[AnyCase],
    sides: Callable[[AnyCase], tuple[Step, Step]],
) -> None:
    """Measure one row for each case, alternating the two sides after one step of each, and report them; `sides` makes
    inputs for a case, and our step and the opponent's on them.

    With `--cpu-time` the times are the processor's, of all threads of the process, with one thread for torch: what
    else the machine does changes them least.
    """
    options = parser(description)
    options.add_argument("--cpu-time", action="store_true", help="processor time on one thread")
    arguments = options.parse_args()
    clock = time.perf_counter
    if arguments.cpu_time:
        clock = time.process_time
        torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [_measure(case, sides(case), arguments.rounds, clock) for case in cases]
    measured = "processor time" if arguments.cpu_time else "elapsed time"
    report(title, rows, arguments.json, threads=torch.get_num_threads(), measured=measured)
