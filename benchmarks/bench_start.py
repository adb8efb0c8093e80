"""Measure the time from nothing to the first token, and loading the same file with transformers, in turn.

Both sides run in a fresh interpreter with everything cached on disk: imports count on both. The time from
`%engine start` to the first token of `%%generate` is measured in fresh kernels: one that starts the engine at
once, and one whose extension has been loaded for some seconds, so that there is a spare engine.

python benchmarks/bench_start.py [--json PATH] [--dtype bfloat16] [--model NAME] [--idle 5]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import alternate, median_ratio, parser, report
from jupyter_client.manager import start_new_kernel
from kernel_client import execute

from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model

OURS = """
import time
start = time.perf_counter()
from nbengine import AsyncLLM, SamplingParams
engine = AsyncLLM({model!r}, dtype="{dtype}")
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
    """Return the first figure that a fresh interpreter prints for `code`; append the second to `second`."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole, part = map(float, result.stdout.split()[-2:])
    second.append(part)
    return whole


def run_in_kernel(line: str, idle: float) -> float:
    """Return the seconds from a `%engine start` line, given `idle` seconds after the extension is loaded, to the
    end of an answer of one token."""
    manager, client = start_new_kernel()
    try:
        execute(client, "%load_ext nbengine")
        time.sleep(idle)
        start = time.perf_counter()
        execute(client, line)
        execute(client, "%%generate --max-tokens 1 --temperature 0\nOnce upon a time")
        taken = time.perf_counter() - start
        execute(client, "%engine stop")
        return taken
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def main() -> None:
    """Alternate the two and print medians."""
    options = parser(__doc__)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--model", default="smollm2-135m", help="a .gguf file, or an alias of one")
    options.add_argument("--idle", type=float, default=5.0, help="seconds in which a spare engine gets ready")
    arguments = options.parse_args()
    directory, _, file = resolve_model(ModelConfig(arguments.model)).weights[0].rpartition("/")
    model = arguments.model if Path(arguments.model).suffix != ".gguf" else f"{directory}/{file}"
    ours_code = OURS.format(dtype=arguments.dtype, model=model)
    line = f"%engine start {model} --dtype {arguments.dtype}"
    peer_code = PEER.format(directory=directory, file=file, dtype=arguments.dtype)
    to_ready: list[float] = []
    load_only: list[float] = []
    ours, theirs, at_once, with_spare = alternate(
        arguments.rounds,
        lambda: run(ours_code, to_ready),
        lambda: run(peer_code, load_only),
        lambda: run_in_kernel(line, 0.0),
        lambda: run_in_kernel(line, arguments.idle),
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
        {
            "what": "%engine start to first token, at once",
            "median s": statistics.median(at_once),
            "of which": "limit 2 s",
        },
        {
            "what": f"%engine start to first token, {arguments.idle:g} s later",
            "median s": statistics.median(with_spare),
            "of which": "limit 1.2 s",
        },
    ]
    report(f"start, {arguments.dtype}", rows, arguments.json)


if __name__ == "__main__":
    main()
