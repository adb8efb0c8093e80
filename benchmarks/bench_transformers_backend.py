"""Measure tokens a second of a model whose layers are those of transformers, in the engine and in transformers'
`generate` on one static batch, in turn.

The model is StableLM's class, which has no family in nbengine, with the sizes of SmolLM2-135M and random weights.
A static batch lasts until its longest output is there, and pads its prompts on the left. Rows: all requests with
128 prompt tokens and 64 output tokens; and lengths as they come, log-normal around these.

With --cpu-time the figures are tokens for each second of the process's CPU time, where something else runs beside
it. --layers 8 takes about a quarter of the time.

python benchmarks/bench_transformers_backend.py [--json PATH] [--dtype bfloat16] [--streams 32] [--layers 30] [--cpu-time]
"""

from __future__ import annotations

import gc
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import alternate, median_ratio, parser, report
from transformers import AutoModelForCausalLM, PreTrainedModel, StableLmConfig, StableLmForCausalLM

from nbengine import LLM, SamplingParams
from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
VOCAB_SIZE = 49152
KV_CACHE_BYTES = 2 << 30

Clock = Callable[[], float]


@dataclass(frozen=True)
class Work:
    """The prompts of a row, as token ids, and the number of tokens that each is to get."""

    prompts: list[list[int]]
    outputs: list[int]

    @classmethod
    def of_one_length(cls, streams: int, chooser: random.Random) -> Work:
        """Make requests that are all alike in length."""
        return cls([_tokens(PROMPT_TOKENS, chooser) for _ in range(streams)], [OUTPUT_TOKENS] * streams)

    @classmethod
    def of_many_lengths(cls, streams: int, chooser: random.Random) -> Work:
        """Make requests whose lengths have these medians, and spread by a factor of about two."""

        def length(median: int) -> int:
            return min(4 * median, max(median // 8, int(median * chooser.lognormvariate(0, 0.7))))

        return cls(
            [_tokens(length(PROMPT_TOKENS), chooser) for _ in range(streams)],
            [length(OUTPUT_TOKENS) for _ in range(streams)],
        )


def _tokens(count: int, chooser: random.Random) -> list[int]:
    return [chooser.randrange(100, 40000) for _ in range(count)]


def write_model(directory: Path, layers: int, dtype: str) -> None:
    """Write the checkpoint, with the tokenizer of `random-tiny`, which nothing here uses."""
    torch.manual_seed(0)
    config = StableLmConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    StableLmForCausalLM._from_config(config, dtype=getattr(torch, dtype)).save_pretrained(directory)
    source = Path(resolve_model(ModelConfig("random-tiny")).directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)


def peer_seconds(model: PreTrainedModel, work: Work, clock: Clock = time.perf_counter) -> float:
    """Return the seconds of one static batch of all prompts, padded on the left."""
    longest = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in work.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts])
    count = max(work.outputs)
    start = clock()
    with torch.inference_mode():
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        ).cpu()
    return clock() - start


def engine_seconds(llm: LLM, work: Work, clock: Clock = time.perf_counter) -> float:
    """Return the seconds of all prompts at once through the engine, from a cold prefix cache."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in work.outputs]
    start = clock()
    llm.generate([{"prompt_token_ids": ids} for ids in work.prompts], params, use_tqdm=False)
    return clock() - start


def main() -> None:
    """Measure one row for each kind of lengths."""
    options = parser(__doc__)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--streams", type=int, default=32)
    options.add_argument("--layers", type=int, default=30)
    options.add_argument("--cpu-time", action="store_true")
    arguments = options.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    chooser = random.Random(0)
    kinds = {
        f"{PROMPT_TOKENS} in, {OUTPUT_TOKENS} out": Work.of_one_length(arguments.streams, chooser),
        "lengths as they come": Work.of_many_lengths(arguments.streams, chooser),
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, arguments.layers, arguments.dtype)
        with LLM(
            name,
            dtype=arguments.dtype,
            max_model_len=1024,
            # Enough for all requests: the pages of a larger cache would be taken while the rounds are measured.
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            multiprocess=False,
        ) as llm:
            device = llm.llm_engine.ready.device
            peer = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, arguments.dtype))
            peer = peer.eval().to(device)
            # An engine's own process does so, too: the collector need not look through both models in every round.
            gc.collect()
            gc.freeze()
            for kind, work in kinds.items():
                ours, theirs = alternate(
                    arguments.rounds,
                    lambda work=work: engine_seconds(llm, work, clock),
                    lambda work=work: peer_seconds(peer, work, clock),
                )
                tokens = sum(work.outputs)
                rows.append(
                    {
                        "lengths": kind,
                        "nbengine tok/s": tokens / statistics.median(ours),
                        "transformers static batch tok/s": tokens / statistics.median(theirs),
                        "speed-up (median ratio)": 1 / median_ratio(ours, theirs),
                    }
                )
    title = f"layers of transformers, {arguments.streams} streams, {arguments.dtype} on {device}"
    report(title, rows, arguments.json)


if __name__ == "__main__":
    main()
