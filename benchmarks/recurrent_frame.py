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


def _milliseconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def _measure(case: Case, sides: tuple[Step, Step], rounds: int) -> dict[str, Any]:
    ours, theirs = sides
    our_times, their_times = alternate(rounds, lambda: _milliseconds(ours), lambda: _milliseconds(theirs))
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
    inputs for a case, and our step and the opponent's on them."""
    arguments = parser(description).parse_args()
    with torch.inference_mode():
        rows = [_measure(case, sides(case), arguments.rounds) for case in cases]
    report(title, rows, arguments.json, threads=torch.get_num_threads())
