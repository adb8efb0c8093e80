"""transformers' `generate` with one static batch, on the weights of the file as bfloat16.

For measuring quality it computes in float32: then its logits are the reference.
"""

from __future__ import annotations

import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig, StoppingCriteria

from peers.protocol import Job, Timing


def version() -> str:
    """Return the version of transformers."""
    return metadata.version("transformers")


class _FirstToken(StoppingCriteria):
    """Never stops a generation, and knows when its first token was there."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.at = self.at or time.monotonic()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """A model with dequantised weights."""

    def __init__(self, job: Job) -> None:
        path = Path(job.model)
        torch.set_num_threads(job.threads)
        exact = job.logits_from is not None
        self._model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32 if exact else torch.bfloat16,
        ).eval()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Generate greedily; all prompts have to have the same length."""
        ids, first = torch.tensor(prompts), _FirstToken()
        start = time.monotonic()
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                stopping_criteria=[first],
            )
        total = time.monotonic() - start
        assert first.at is not None
        return Timing(first.at - start, total)

    def logits(self, prompts: list[list[int]], first: int) -> Any:
        """Return the logits of each prompt's positions."""
        with torch.inference_mode():
            found = [self._model(torch.tensor([ids])).logits[0, first:].float() for ids in prompts]
        return torch.stack(found).numpy()

    def pids(self) -> list[int]:
        """List this process."""
        return [os.getpid()]

    def close(self) -> None:
        """Nothing was started."""


def load(job: Job) -> Transformers:
    """Load the file."""
    return Transformers(job)
