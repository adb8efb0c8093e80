"""mistral.rs on the GGUF file, through its Python package.

It takes texts alone, so that its prompts have the job's numbers of tokens and other ids; this costs the same. The
times of one request are those that it reports, without the interpreter.
"""

from __future__ import annotations

import os
import random
import string
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from mistralrs import CompletionRequest, Runner, Which

from peers.protocol import Job, Timing


def version() -> str:
    """Return the version of the package."""
    return metadata.version("mistralrs")


class MistralRs:
    """A runner for the job's number of streams."""

    def __init__(self, job: Job) -> None:
        # Its threads are made when the first operation needs them.
        os.environ["RAYON_NUM_THREADS"] = str(job.threads)
        path = Path(job.model)
        which = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        self._runner = Runner(which, max_seqs=job.most_streams, prefix_cache_n=0)
        self._texts: dict[tuple[int, ...], str] = {}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Generate greedily, all prompts at once, each from a thread of its own."""
        texts = [self._text_for(prompt) for prompt in prompts]
        requests = [
            CompletionRequest(text, model="default", max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
            for text in texts
        ]
        with ThreadPoolExecutor(len(requests)) as threads:
            start = time.monotonic()
            used = [answer.usage for answer in threads.map(self._runner.send_completion_request, requests)]
            total = time.monotonic() - start
        for prompt, usage in zip(prompts, used, strict=True):
            if (usage.prompt_tokens, usage.completion_tokens) != (len(prompt), new_tokens):
                raise RuntimeError(
                    f"mistral.rs read {usage.prompt_tokens} tokens and gave {usage.completion_tokens}, "
                    f"in place of {len(prompt)} and {new_tokens}"
                )
        first = max(usage.total_prompt_time_sec for usage in used)
        if len(used) == 1:
            total = first + used[0].total_completion_time_sec
        return Timing(first, total)

    def logits(self, prompts: list[list[int]], first: int) -> Any:
        """Refuse: the package does not give logits."""
        raise NotImplementedError("mistral.rs gives no logits")

    def pids(self) -> list[int]:
        """List this process."""
        return [os.getpid()]

    def close(self) -> None:
        """Nothing was started."""

    def _text_for(self, prompt: list[int]) -> str:
        """Return a text of as many tokens; every prompt has one of its own."""
        key = tuple(prompt)
        if key not in self._texts:
            chooser, text, count = random.Random(repr(key)), "", 0
            while count != len(prompt):
                if count > len(prompt):
                    text = text[: len(prompt) - count]
                else:
                    text += "".join(chooser.choices(string.ascii_uppercase, k=len(prompt) - count))
                count = len(self._runner.tokenize_text(text, True, None))
            self._texts[key] = text
        return self._texts[key]


def load(job: Job) -> MistralRs:
    """Load the file."""
    return MistralRs(job)
