"""nbengine itself, through its offline interface: the engine core is a process of its own."""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nbengine import LLM, SamplingParams
from peers.protocol import Job, Timing

BLOCK_SIZE = 16
RECORDER = "peers.recorder:Recorder"


def version() -> str:
    """Return the version of nbengine."""
    return metadata.version("nbengine")


class NBEngine:
    """An engine with the room for tokens that the job asks for."""

    def __init__(self, job: Job) -> None:
        self._records = TemporaryDirectory() if job.logits_from is not None else None
        options: dict[str, Any] = dict(job.arguments)
        if self._records is not None:
            options |= {"logits_processors": [RECORDER], "multiprocess": False}
        self._llm = LLM(
            job.model,
            num_gpu_blocks_override=-(-job.kv_tokens // BLOCK_SIZE) + 1,
            max_model_len=max(job.most_tokens + 1, 64),
            **options,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Generate greedily, with nothing in the prefix cache."""
        self._llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.monotonic()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        total = time.monotonic() - start
        first = max(output.metrics.first_token_time for output in outputs)
        return Timing(first - start, total)

    def logits(self, prompts: list[list[int]], first: int) -> Any:
        """Return the logits of the steps that decode the given tokens: a processor of the engine writes them
        down, and forces the next token of the prompt."""
        import numpy as np

        assert self._records is not None
        steps = len(prompts[0]) - first
        requests = [{"prompt_token_ids": ids[: first + 1]} for ids in prompts]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=steps,
                ignore_eos=True,
                detokenize=False,
                extra_args={
                    "record": str(Path(self._records.name) / f"{index}.npy"),
                    "tokens": [*ids[first + 1 :], 0],
                },
            )
            for index, ids in enumerate(prompts)
        ]
        self._llm.generate(requests, params, use_tqdm=False)
        files = [Path(self._records.name) / f"{index}.npy" for index in range(len(prompts))]
        return np.stack([np.load(file) for file in files])

    def pids(self) -> list[int]:
        """List this client, the host and the engine core."""
        if self._records is not None:
            return []
        return [process.pid for process in self._llm.process_tree().processes if process.is_running]

    def close(self) -> None:
        """Shut the engine down."""
        self._llm.shutdown()
        if self._records is not None:
            self._records.cleanup()


def load(job: Job) -> NBEngine:
    """Start an engine."""
    return NBEngine(job)
