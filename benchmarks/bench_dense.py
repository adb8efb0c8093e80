"""Measure products with dense weights on the CPU, beside torch's.

    python benchmarks/bench_dense.py [--json PATH] [--rounds 5] [--cpu-time] [--instructions avx512_bf16] [--dtype float32]

The shapes are those of the default model's layers and of its output projection. Each pass goes over several weights of
a shape, 64 MB of them, on all of torch's threads; the sides take turns, and the times are those of the fastest product
of each, in microseconds: on a machine that does something else besides, the others say more about that. With
`--cpu-time` they are the processor's time on one thread, which what else runs changes least. `--instructions` takes others than the best ones that the processor has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import alternate, parser, report
from torch import Tensor

from nbengine.kernels.cpu.dense import CpuDense
from nbengine.kernels.cpu.dense_parts import Instructions
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.jit import host_processor

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
"""Rows and columns of a layer's products, and those of the output projection."""
ROWS = (1, 8, 32, 64, 512)
WEIGHT_BYTES = 64 << 20
MOST_NUMBERS = 1 << 22
"""Results of a product; larger ones take seconds."""
Product = Callable[[Tensor, Tensor], Tensor]


def microseconds(clock: Callable[[], float], product: Product, x: Tensor, weights: list[Tensor]) -> float:
    """Return the microseconds that a product takes, with the weight with which it is fastest."""
    best = float("inf")
    for weight in weights:
        start = clock()
        product(x, weight)
        best = min(best, clock() - start)
    return best * 1e6


def measure(
    shape: tuple[int, int],
    dtype: torch.dtype,
    products: CpuDense,
    rounds: int,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """Measure a shape with each number of rows."""
    out_features, columns = shape
    weight = torch.randn(shape).to(dtype)
    weights = [weight.clone() for _ in range(max(1, WEIGHT_BYTES // weight.nbytes))]
    found = []
    for rows in (rows for rows in ROWS if rows * out_features < MOST_NUMBERS):
        x = torch.randn(rows, columns).to(dtype)
        few = weights[: max(1, len(weights) // max(1, rows // 8))]
        sides = (partial(microseconds, clock, side, x, few) for side in (products.linear, F.linear))
        ours, theirs = (min(times) for times in alternate(rounds, *sides))
        found.append(
            {
                "weight": f"{out_features} x {columns}",
                "rows": rows,
                "nbengine": f"{ours:.0f}",
                "torch": f"{theirs:.0f}",
                "ratio": f"{ours / theirs:.2f}",
            }
        )
    return found


def main() -> None:
    """Measure every shape."""
    cli = parser(__doc__)
    cli.add_argument("--instructions", choices=[each.value for each in Instructions])
    cli.add_argument("--cpu-time", action="store_true")
    cli.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    arguments = cli.parse_args()
    clock = time.perf_counter
    if arguments.cpu_time:
        clock = time.thread_time
        torch.set_num_threads(1)
    chosen = Instructions(arguments.instructions) if arguments.instructions else None
    dtype = getattr(torch, arguments.dtype)
    best, *_ = Instructions.of(host_processor(), ELEMENTS[dtype])
    products = CpuDense(chosen)
    rows = [row for shape in SHAPES for row in measure(shape, dtype, products, arguments.rounds, clock)]
    used = (chosen or best).value
    report(f"dense products in {arguments.dtype}, microseconds", rows, arguments.json, instructions=used)


if __name__ == "__main__":
    main()
