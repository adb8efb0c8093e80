"""From nothing to the first token, against loading the same file with transformers, alternating.

Both sides run in a fresh interpreter with everything cached on disk: imports count on both.

python benchmarks/bench_start.py [--json PATH] [--dtype bfloat16]
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from common import alternate, median_ratio, parser, report

from nbengine.config import ModelConfig
from nbengine.models.files import resolve_model

OURS = """
import time
start = time.perf_counter()
from nbengine import AsyncLLM, SamplingParams
engine = AsyncLLM("smollm2-135m", dtype="{dtype}")
ready = time.perf_counter()
stream = engine.submit("Once upon a time", SamplingParams(temperature=0, max_tokens=2))
stream.get_blocking()
print(time.perf_counter() - start, ready - start)
engine.shutdown()
"""
PEER = """
import time
start = time.perf_counter()
import torch
from transformers import AutoModelForCausalLM, GgufConfig
imported = time.perf_counter()
AutoModelForCausalLM.from_pretrained(
    {directory!r}, gguf_file={file!r}, quantization_config=GgufConfig(dequantize=True), dtype=torch.{dtype})
print(time.perf_counter() - start, time.perf_counter() - imported)
"""


def run(code: str, second: list[float]) -> float:
    """First figure that a fresh interpreter prints for `code`; the second is appended to `second`."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole, part = map(float, result.stdout.split()[-2:])
    second.append(part)
    return whole


def main() -> None:
    """Alternate the two and print medians."""
    options = parser(__doc__)
    options.add_argument("--dtype", default="bfloat16")
    arguments = options.parse_args()
    weights = resolve_model(ModelConfig("smollm2-135m")).weights[0]
    directory, _, file = weights.rpartition("/")
    ours_code = OURS.format(dtype=arguments.dtype)
    peer_code = PEER.format(directory=directory, file=file, dtype=arguments.dtype)
    to_ready: list[float] = []
    load_only: list[float] = []
    ours, theirs = alternate(
        arguments.rounds, lambda: run(ours_code, to_ready), lambda: run(peer_code, load_only)
    )
    rows = [
        {
            "what": "nbengine: start to first token",
            "median s": statistics.median(ours),
            "of which": f"ready after {statistics.median(to_ready):.2f} s",
        },
        {
            "what": "transformers: import and load",
            "median s": statistics.median(theirs),
            "of which": f"load {statistics.median(load_only):.2f} s",
        },
        {"what": "ratio (median of pairs)", "median s": median_ratio(ours, theirs), "of which": "limit 0.7"},
        {
            "what": "ratio to the load alone",
            "median s": median_ratio(ours, load_only[-len(ours) :]),
            "of which": "",
        },
    ]
    report(f"start, {arguments.dtype}", rows, arguments.json)


if __name__ == "__main__":
    main()
