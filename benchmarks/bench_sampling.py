"""Measure sampling a step: from the logits to the tokens on the host, with each thing a request can ask for.

    python benchmarks/bench_sampling.py [--json PATH] [--dtype float32|bfloat16]

Vocabulary 49,152, prompts of 256 tokens and 128 generated ones, drawn as often as words are in text (Zipf's
law, in the order of their ids). Every request of a batch asks for the same. Each case runs in turn with
greedy sampling; times are medians in microseconds, the ratio is the median of the ratios of neighbouring
rounds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from common import alternate, median_ratio, parser, report
from numpy.typing import NDArray

from nbengine.sampling.logits import TokenMask
from nbengine.sampling.rows import ALL_ROWS
from nbengine.sampling.sampler import Sampler
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from nbengine.worker.batch.input_batch import InputBatch

VOCAB, PROMPT, OUTPUT, BLOCK = 49_152, 256, 128, 16
STEPS = 16
BATCHES = (1, 8, 64)
GREEDY = {"temperature": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "random": {},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "all penalties": {
        **GREEDY,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    "300 biases, 20 bad words, 5,000 allowed": {
        **GREEDY,
        "logit_bias": {7 * i: 0.5 for i in range(300)},
        "bad_words_token_ids": [[i] if i % 2 else [i, 2 * i] for i in range(1, 21)],
        "allowed_token_ids": list(range(0, 50_000 - 10_000, 8)),
    },
    "logprobs 5": {**GREEDY, "logprobs": 5},
    "structured mask": GREEDY,
}


class Side:
    """A batch of requests after `OUTPUT` tokens, and the step that samples the next ones."""

    def __init__(
        self, batch_size: int, params: dict[str, Any], logits: torch.Tensor, *, masked: bool
    ) -> None:
        self.batch = InputBatch(batch_size, 4096, BLOCK, VOCAB)
        self.sampler = Sampler()
        self.logits = logits[:batch_size]
        self.rows = np.arange(batch_size)
        random = np.random.default_rng(0)
        plan = SchedulerOutput([], CachedRequestData(), {}, 0, set())
        for index in range(batch_size):
            prompt = zipf(random, PROMPT).tolist()
            settings = SamplingParams(seed=index, max_tokens=4096, **params)
            plan.scheduled_new_reqs.append(NewRequestData(str(index), prompt, settings, [], 0))
        self.batch.update(plan)
        self.words = None
        if masked:
            self.words = random.integers(-(2**31), 2**31, (batch_size, VOCAB // 32)).astype(np.int32)
        for _ in range(OUTPUT):
            self.append(torch.from_numpy(zipf(random, batch_size)))

    def append(self, tokens: torch.Tensor) -> None:
        """Append tokens as the next ones."""
        self.batch.sampling.metadata(self.rows)
        self.batch.sampling.append_on_device(tokens)
        self.batch.append(self.rows, tokens.numpy())

    def step(self) -> NDArray[np.int64]:
        """Do what the model runner does with a step's logits."""
        sampling = self.batch.sampling
        metadata = sampling.metadata(self.rows)
        uniform = torch.from_numpy(sampling.uniforms(self.rows)) if metadata.random else None
        mask = None if self.words is None else TokenMask(ALL_ROWS, torch.from_numpy(self.words))
        output = self.sampler(self.logits, metadata, uniform, sampling.constraints(self.rows, mask))
        sampling.append_on_device(output.token_ids)
        tokens = output.token_ids.cpu().numpy()
        self.batch.append(self.rows, tokens)
        if output.logprobs is not None and metadata.logprobs is not None:
            output.logprobs.to_lists(metadata.logprobs.counts)
        return tokens

    def microseconds(self, pristine: torch.Tensor) -> float:
        """Return the median time of a step; the logits, which it may change, are restored between steps.

        That is done on one thread: what another core has just written takes long to read.
        """
        words, source = self.logits.view(torch.int16).numpy(), pristine.view(torch.int16).numpy()
        times = []
        for _ in range(STEPS):
            np.copyto(words, source[: len(words)])
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6


def zipf(random: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Draw tokens whose frequency is inversely proportional to their rank, which is their id."""
    return np.exp(random.random(count) * np.log(VOCAB)).astype(np.int64)


def measure(name: str, batch_size: int, pristine: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Measure a case and greedy sampling in turn."""
    logits = pristine.clone()
    case = Side(batch_size, CASES[name], logits, masked=name == "structured mask")
    greedy = Side(batch_size, GREEDY, logits, masked=False)
    ours, base = alternate(rounds, lambda: case.microseconds(pristine), lambda: greedy.microseconds(pristine))
    return {
        "case": name,
        "batch": batch_size,
        "us": statistics.median(ours),
        "min": min(ours),
        "greedy us": statistics.median(base),
        "ratio to greedy (median)": median_ratio(ours, base),
        "us more a request": (statistics.median(ours) - statistics.median(base)) / batch_size,
    }


def main() -> None:
    """Measure one row for each case and batch size."""
    arguments = parser(__doc__)
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = arguments.parse_args()
    generator = torch.Generator().manual_seed(0)
    pristine = torch.randn(max(BATCHES), VOCAB, generator=generator).mul_(3)
    pristine = pristine.to(getattr(torch, options.dtype))
    with torch.inference_mode():
        rows = [measure(name, batch, pristine, options.rounds) for name in CASES for batch in BATCHES]
    report(
        f"sampling, {options.dtype} logits, vocabulary {VOCAB}",
        rows,
        options.json,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
