"""llama.cpp through llama-cpp-python's low-level interface, without the cost of its Python loop.

Its `Llama` class samples in Python and has one sequence; here `llama_decode` gets batches as llama.cpp's own
tools give them, and the largest logit of each sequence is taken with numpy.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from peers.protocol import Job, Timing

BATCH = 2048
"""The most tokens of one `llama_decode`; the library divides them by its own `n_ubatch`."""


def version() -> str:
    """Return the version of the binding."""
    return str(lib.__version__)


@lib.llama_log_callback
def _quiet(level: int, text: bytes, data: Any) -> None:
    """Take a line of the library's log."""


def _has_amx() -> bool:
    try:
        return " amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


class LlamaCpp:
    """A model and a context with the defaults of llama.cpp, but for sizes and threads."""

    def __init__(self, job: Job) -> None:
        lib.llama_log_set(_quiet, None)
        lib.llama_backend_init()
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        # With them, version 0.3.36 ends with an illegal instruction where the processor has AMX.
        settings.use_extra_bufts = not _has_amx()
        self._model = lib.llama_model_load_from_file(job.model.encode(), settings)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {job.model}")
        sizes = lib.llama_context_default_params()
        sizes.n_ctx = job.kv_tokens
        sizes.n_batch = BATCH
        sizes.n_seq_max = job.most_streams if job.logits_from is None else 1
        sizes.n_threads = sizes.n_threads_batch = job.threads
        # One buffer for all sequences: llama.cpp's server has it so.
        sizes.kv_unified = True
        self._context = lib.llama_init_from_model(self._model, sizes)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {job.kv_tokens} tokens")
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Compute the prompts in batches of several, then a token of each at a time."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        start = time.monotonic()
        tokens = self._prefill(prompts)
        first = time.monotonic() - start
        for step in range(1, new_tokens):
            for index, (prompt, token) in enumerate(zip(prompts, tokens, strict=True)):
                self._put(index, token, len(prompt) + step - 1, index, True)
            self._decode(len(prompts))
            tokens = [self._best(index) for index in range(len(prompts))]
        return Timing(first, time.monotonic() - start)

    def logits(self, prompts: list[list[int]], first: int) -> Any:
        """Return the logits of each prompt's positions, computed as one batch a prompt."""
        found = []
        for prompt in prompts:
            lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
            for position, token in enumerate(prompt):
                self._put(position, token, position, 0, position >= first)
            self._decode(len(prompt))
            found.append([self._logits(position).copy() for position in range(first, len(prompt))])
        return np.array(found, np.float32)

    def pids(self) -> list[int]:
        """List this process."""
        import os

        return [os.getpid()]

    def close(self) -> None:
        """Free everything."""
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """Compute all prompts; return the first token of each."""
        tokens = [0] * len(prompts)
        ends: dict[int, int] = {}
        filled = 0

        def flush() -> None:
            self._decode(filled)
            for sequence, index in ends.items():
                tokens[sequence] = self._best(index)
            ends.clear()

        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                is_last = position == len(prompt) - 1
                self._put(filled, token, position, sequence, is_last)
                if is_last:
                    ends[sequence] = filled
                filled += 1
                if filled == BATCH:
                    flush()
                    filled = 0
        if filled:
            flush()
        return tokens

    def _put(self, index: int, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        batch = self._batch
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = wants_logits

    def _decode(self, count: int) -> None:
        self._batch.n_tokens = count
        status = lib.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status} for {count} tokens")

    def _logits(self, index: int) -> Any:
        pointer = lib.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, (self._vocabulary,))

    def _best(self, index: int) -> int:
        return int(self._logits(index).argmax())


def load(job: Job) -> LlamaCpp:
    """Load the file."""
    return LlamaCpp(job)
