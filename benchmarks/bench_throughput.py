"""Measure tokens a second of the engine and of transformers' `generate` on the same weights, in turn.

The shapes are those of the field: 128 random prompt tokens and 64 output tokens a request, all requests at
once.

python benchmarks/bench_throughput.py [--json PATH] [--dtype bfloat16] [--streams 1,8,32]
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import alternate, median_ratio, parser, report
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from nbengine import LLM, SamplingParams
from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64


def load_peer(gguf: Path, dtype: str) -> PreTrainedModel:
    """Load the same file in transformers."""
    return AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    ).eval()


def peer_seconds(model: PreTrainedModel, prompts: list[list[int]]) -> float:
    """Return the seconds of one static batch of all prompts."""
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
        )
    return time.perf_counter() - start


def engine_seconds(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the seconds of all prompts at once through the engine, from a cold prefix cache."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    """Measure one row for each number of streams."""
    options = parser(__doc__)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--streams", default="1,8,32")
    arguments = options.parse_args()
    streams = [int(n) for n in arguments.streams.split(",")]
    chooser = random.Random(0)
    prompts = [[chooser.randrange(100, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(max(streams))]
    rows: list[dict[str, Any]] = []
    with LLM("smollm2-135m", dtype=arguments.dtype, max_model_len=1024) as llm:
        peer = load_peer(Path(resolve_model(ModelConfig("smollm2-135m")).weights[0]), arguments.dtype)
        for count in streams:
            batch = prompts[:count]
            ours, theirs = alternate(
                arguments.rounds,
                lambda batch=batch: engine_seconds(llm, batch),
                lambda batch=batch: peer_seconds(peer, batch),
            )
            tokens = count * OUTPUT_TOKENS
            rows.append(
                {
                    "streams": count,
                    "nbengine tok/s": tokens / statistics.median(ours),
                    "transformers static batch tok/s": tokens / statistics.median(theirs),
                    "speed-up (median ratio)": 1 / median_ratio(ours, theirs),
                }
            )
        together, one_by_one = alternate(
            1,
            lambda: engine_seconds(llm, prompts),
            lambda: sum(peer_seconds(peer, [prompt]) for prompt in prompts),
            warmup=0,
        )
    tokens = len(prompts) * OUTPUT_TOKENS
    rows.append(
        {
            "streams": f"{len(prompts)}, peer one after another",
            "nbengine tok/s": tokens / statistics.median(together),
            "transformers static batch tok/s": tokens / statistics.median(one_by_one),
            "speed-up (median ratio)": 1 / median_ratio(together, one_by_one),
        }
    )
    report(f"throughput, {PROMPT_TOKENS} in, {OUTPUT_TOKENS} out, {arguments.dtype}", rows, arguments.json)


if __name__ == "__main__":
    main()
