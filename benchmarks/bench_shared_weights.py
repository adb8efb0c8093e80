"""Measure starts, memory and decoding of two engines of a model with packed weights, mapped and not.

    python benchmarks/bench_shared_weights.py [--model NAME_OR_GGUF] [--quantization int4] [--json PATH]

Each side starts one engine and then a second one beside it: "private" keeps no packed weights, so that every start
reads the model's files and packs them; "mapped" takes them from the cache, which an engine before has filled.
Starts are in seconds, up to the first token. Memory is that of the engine core's process in MiB, each shared page
divided among those that have it (Pss). Decoding is the median of the tokens a second of one request.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import parser, report

from nbengine import LLM, SamplingParams

PROMPT = {"prompt_token_ids": list(range(10, 74))}
TOKENS = 97
SIDES = {"private": "0", "mapped": ""}


def tokens(llm: LLM, count: int) -> float:
    """Return the seconds that `count` tokens of one request take."""
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([PROMPT], sampling, use_tqdm=False)
    return time.perf_counter() - start


def memory(llm: LLM) -> float:
    """Return the MiB of an engine core's process, its part of what it shares."""
    lines = Path(f"/proc/{llm.llm_engine.ready.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def start(model: str, arguments: dict[str, Any]) -> tuple[LLM, float]:
    """Start an engine; return it, and the seconds until it has given a token."""
    begun = time.perf_counter()
    llm = LLM(model, device="cpu", num_gpu_blocks_override=600, max_model_len=4096, **arguments)
    tokens(llm, 1)
    return llm, time.perf_counter() - begun


def main() -> None:
    """Measure both sides in turn, and report the medians."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="smollm2-135m", help="a model, or a GGUF file")
    arguments.add_argument("--quantization", choices=("int8", "int4"), help="for a model in 16 or 32 bits")
    options = arguments.parse_args()
    asked = {} if options.model.endswith(".gguf") else {"quantization": options.quantization or "int4"}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["NBENGINE_CACHE_DIR"] = directory
        start(options.model, asked)[0].shutdown()
        for _ in range(options.rounds):
            for side, limit in SIDES.items():
                os.environ["NBENGINE_PACKED_WEIGHTS_GIB"] = limit
                first, first_seconds = start(options.model, asked)
                alone = memory(first)
                rate = TOKENS / statistics.median(tokens(first, TOKENS) for _ in range(5))
                second, second_seconds = start(options.model, asked)
                row = {
                    "first start": first_seconds,
                    "second start": second_seconds,
                    "Pss of one": alone,
                    "Pss of two": memory(first) + memory(second),
                    "tokens a second": rate,
                }
                found[side].append(row)
                first.shutdown()
                second.shutdown()
    rows = [
        {"weights": side, **{name: statistics.median(row[name] for row in held) for name in held[0]}}
        for side, held in found.items()
    ]
    report("Two engines of a model with packed weights", rows, options.json)


if __name__ == "__main__":
    main()
