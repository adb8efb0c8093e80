"""Hybrid models from GGUF files in an engine: greedy tokens in float32 are those of transformers, on one worker and on
two, cold and from checkpoints; and what is foretold from a file's header is what a start reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import nbengine
from nbengine import LLM, SamplingParams
from tests.support.gguf_cases import CASES
from tests.support.gguf_converter import VOCABULARY, convert
from tests.support.random_models import assert_greedy, save_random
from tests.support.thorough import amount

NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {"max_model_len": 200, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 4}
TWO_WORKERS = amount(
    [("lfm2", "tensor_parallel_size"), ("qwen3.5", "pipeline_parallel_size")],
    thorough=[
        (name, parallel)
        for name in ("qwen3.5", "granite 4", "lfm2")
        for parallel in ("tensor_parallel_size", "pipeline_parallel_size")
    ],
)
"""Threads as ranks prove each family's division; processes that theirs is the same. `test_hybrids_equal_transformers.py` has
two other families."""
FORETOLD = [("granite 4", 1), ("qwen3.5 moe", 2)]
EVEN = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}


def made(name: str, directory: Path, kind: Kind = Kind.F32) -> tuple[Any, Path]:
    """A model of transformers, and the GGUF file of it."""
    case = CASES[name]
    even = EVEN if case.arch.startswith("qwen3") else {}
    model = save_random(case.kind, {**case.settings, **even, "vocab_size": VOCABULARY}, directory)
    return model, convert(directory, directory / "model.gguf", kind, case.more)


def check(name: str, directory: Path, *, multiprocess: bool, **options: Any) -> None:
    """Run prompts twice, the second time from checkpoints."""
    model, path = made(name, directory)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (70, 1, 33)]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(str(path), multiprocess=multiprocess, dtype="float32", **OPTIONS, **options) as llm:
        for cached in (0, 64):
            outputs = llm.generate(inputs, params, use_tqdm=False)
            assert outputs[0].num_cached_tokens == cached
            for prompt, output in zip(prompts, outputs, strict=True):
                assert_greedy(model, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize(
    "name",
    # Each family's file gives its logits in `tests/unit/models/test_gguf_families.py`, and each is in an engine, from
    # other files, in `test_hybrids_equal_transformers.py`.
    amount(
        ["qwen3.5 moe", "granite 4 moe"],
        thorough=["qwen3.5", "qwen3.5 moe", "qwen3-next", "granite 4 moe", "lfm2 moe", "mamba-2"],
    ),
)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, multiprocess=False, max_num_batched_tokens=64)


@pytest.mark.parametrize(("name", "parallel"), TWO_WORKERS)
def test_two_workers_give_them_too(name: str, parallel: str, tmp_path: Path) -> None:
    check(name, tmp_path, multiprocess=True, max_num_batched_tokens=64, **{parallel: 2})


@pytest.mark.parametrize(
    ("name", "tp_size"),
    amount(FORETOLD, thorough=[*FORETOLD, ("granite 4", 2), ("lfm2", 1), ("lfm2", 2), ("qwen3.5 moe", 1)]),
)
def test_a_start_reports_what_a_files_header_has_foretold(name: str, tp_size: int, tmp_path: Path) -> None:
    _, path = made(name, tmp_path, Kind.Q8_0)
    foretold = nbengine.fit(str(path), tensor_parallel_size=tp_size, **OPTIONS)
    assert foretold.fits, foretold.problem
    with LLM(str(path), multiprocess=tp_size > 1, tensor_parallel_size=tp_size, **OPTIONS) as llm:
        ready = llm.llm_engine.ready
    assert (foretold.weights_bytes, foretold.num_blocks) == (ready.weights_bytes, ready.num_blocks)
