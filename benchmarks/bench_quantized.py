"""Measure products with quantised weights on the CPU, beside torch's with the same weights in bfloat16.

    python benchmarks/bench_quantized.py [--json PATH]

The products are those of one layer of the default model's shape: hidden size 576, inner size 1536, 9 query and 3
key-value heads. Between two passes, other weights are read, so that each pass takes its weights from memory, as
a step does. Times are medians in microseconds; the ratios are medians of the ratios of neighbouring runs. "of
floor" is the time in which the machine reads as many bytes, measured in the same run, by the time taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import alternate, median_ratio, parser, report
from torch import Tensor

from nbengine.kernels.cpu.quantized import CpuProducts
from nbengine.kernels.quantized import FORMATS, Format

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Rows and columns of a layer's four products."""
TOKENS = (1, 8, 32, 512)
LAYERS = 60
"""Layers of weights: together more than the last cache holds."""
FORMAT_NAMES = ("q4_1", "q8_0")
PASSES = 3


def quantised_layers(form: Format) -> list[list[Tensor]]:
    """Make layers of random weights: scales of 1 and levels of any value."""
    layers = []
    for _ in range(LAYERS):
        weights = []
        for rows, columns in SHAPES:
            data = torch.randint(0, 256, form.data_shape(rows, columns), dtype=torch.uint8)
            data[:, :, form.scales_at :].view(torch.float16).fill_(0.01)
            weights.append(data)
        layers.append(weights)
    return layers


def dense_layers() -> list[list[Tensor]]:
    """Make layers of random weights in bfloat16."""
    return [[torch.randn(shape).bfloat16() for shape in SHAPES] for _ in range(LAYERS)]


def read_seconds_per_byte() -> float:
    """Measure how fast the machine reads: the sum of a large array, on all threads."""
    numbers = torch.ones(1 << 26, dtype=torch.int32)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return min(times) / numbers.nbytes


def microseconds(run: Callable[[list[Tensor]], None], layers: list[list[Tensor]]) -> float:
    """Return the microseconds that a layer takes, in the fastest of some passes over all of them."""
    best = float("inf")
    for _ in range(PASSES):
        start = time.perf_counter()
        for weights in layers:
            run(weights)
        best = min(best, time.perf_counter() - start)
    return best / len(layers) * 1e6


def measure(name: str, rounds: int, dense: list[list[Tensor]], per_byte: float) -> list[dict[str, Any]]:
    """Measure one row for each number of tokens."""
    form, kernels = FORMATS[name], CpuProducts()
    packed = quantised_layers(form)
    num_bytes = sum(weight.nbytes for weight in packed[0])
    rows = []
    for tokens in TOKENS:
        inputs = [torch.randn(tokens, columns) for _, columns in SHAPES]
        narrow = [x.bfloat16() for x in inputs]

        def ours(weights: list[Tensor], inputs: list[Tensor] = inputs) -> None:
            for x, data, (out_features, _) in zip(inputs, weights, SHAPES, strict=True):
                kernels.linear(x, form, data, out_features)

        def theirs(weights: list[Tensor], narrow: list[Tensor] = narrow) -> None:
            for x, weight in zip(narrow, weights, strict=True):
                F.linear(x, weight)

        times = alternate(rounds, partial(microseconds, ours, packed), partial(microseconds, theirs, dense))
        median = statistics.median(times[0])
        rows.append(
            {
                "format": name,
                "tokens": tokens,
                "quantised us": median,
                "bfloat16 us": statistics.median(times[1]),
                "bfloat16 / quantised": 1 / median_ratio(times[0], times[1]),
                "of floor": num_bytes * per_byte * 1e6 / median if tokens == 1 else "",
            }
        )
    return rows


def main() -> None:
    """Measure one row for each format and number of tokens."""
    arguments = parser(__doc__).parse_args()
    with torch.inference_mode():
        per_byte, dense = read_seconds_per_byte(), dense_layers()
        rows = [row for name in FORMAT_NAMES for row in measure(name, arguments.rounds, dense, per_byte)]
    gigabytes = 1e-9 / per_byte
    report(
        "a layer's products with quantised weights",
        rows,
        arguments.json,
        threads=torch.get_num_threads(),
        read_gigabytes_per_second=round(gigabytes, 1),
    )


if __name__ == "__main__":
    main()
