"""OpenVINO GenAI's `LLMPipeline` on the GGUF file, with continuous batching, which is its fastest way for one stream,
too."""

from __future__ import annotations

import os
import time
from importlib import metadata
from typing import Any

import numpy as np
import openvino
import openvino_genai

from peers.protocol import Job, Timing

BLOCK_SIZE = 32
"""Tokens in a block of the pipeline's KV cache on a CPU."""


def version() -> str:
    """Return the version of OpenVINO GenAI."""
    return metadata.version("openvino-genai")


class OpenVINO:
    """A pipeline for the job's number of streams."""

    def __init__(self, job: Job) -> None:
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads}
        # Without a configuration of its own, a pipeline for one stream keeps prompts that it has seen.
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.num_kv_blocks = -(-job.kv_tokens // BLOCK_SIZE)
        scheduling.max_num_seqs = job.most_streams
        scheduling.enable_prefix_caching = False
        options["scheduler_config"] = scheduling
        self._pipeline = openvino_genai.LLMPipeline(job.model, "CPU", **options)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Generate greedily; all prompts have to have the same length."""
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = new_tokens
        settings.ignore_eos = True
        settings.do_sample = False
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start = time.monotonic()
        result = self._pipeline.generate(inputs, settings)
        total = time.monotonic() - start
        if any(len(tokens) != new_tokens for tokens in result.tokens):
            raise RuntimeError(f"OpenVINO gave other than {new_tokens} tokens")
        return Timing(result.perf_metrics.get_ttft().mean / 1000, total)

    def logits(self, prompts: list[list[int]], first: int) -> Any:
        """Refuse: the pipeline does not give logits."""
        raise NotImplementedError("OpenVINO GenAI's pipeline gives no logits")

    def pids(self) -> list[int]:
        """List this process."""
        return [os.getpid()]

    def close(self) -> None:
        """Nothing was started."""


def load(job: Job) -> OpenVINO:
    """Load the file."""
    return OpenVINO(job)
