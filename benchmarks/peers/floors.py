"""The rates of the machine itself: how fast it reads memory and multiplies matrices with the threads used.

`python -m peers.floors THREADS`, in `benchmarks/`, prints them as JSON. Each is the best of several runs: a
floor is what the machine can do.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

READ_BYTES = 1 << 28
"""More than any cache holds."""
ROWS, INNER, COLUMNS = 1024, 2048, 2048
RUNS = 7
MOST_SECONDS = 5.0
"""Seconds after which no further run begins: without the instructions for it, a product takes half a minute."""


def best_seconds(run: Callable[[], object]) -> float:
    """Return the shortest time of several runs; the first one counts only if it is the only one."""
    times: list[float] = []
    while len(times) <= RUNS and sum(times) < MOST_SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:] or times)


def read_rate() -> float:
    """Return the bytes a second that all threads read together: the fastest of some sums over an array."""
    whole = torch.zeros(READ_BYTES // 4, dtype=torch.int32)
    numbers = whole.view(torch.float32)
    runs = (numbers.sum, whole.sum, lambda: torch.dot(numbers, numbers))
    # The product reads one array twice, from the cache the second time.
    return READ_BYTES / min(map(best_seconds, runs))


def matrix_rates() -> dict[str, float]:
    """Return the operations a second (two a product) of torch's matrix product, by dtype."""
    left, right = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)
    operations = 2 * ROWS * INNER * COLUMNS
    rates = {}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = left.to(dtype), right.to(dtype)
        rates[name] = operations / best_seconds(lambda a=a, b=b: a @ b)
    a8, b8 = left.mul(20).to(torch.int8), right.mul(20).to(torch.int8)
    rates["int8"] = operations / best_seconds(lambda: torch._int_mm(a8, b8))
    return rates


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(int(sys.argv[1]))
    with torch.inference_mode():
        print(json.dumps({"read": read_rate(), "matrix": matrix_rates()}))


if __name__ == "__main__":
    main()
