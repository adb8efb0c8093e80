"""Measure what a step in flight for each pipeline stage gains, and compare workers with one process.

    python benchmarks/bench_pipeline.py [--json PATH] [--rounds N] [--without-default-model]

"queue": two stages of one thread each on a seeded random Llama whose stages dominate, with as many steps in
flight as there are stages, against one step at a time, in turn. Without the queue a step takes all requests,
with it half of them. The default model, informational: one process, tensor parallel over 3 workers, two
stages.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import alternate, median_ratio, parser, report
from safetensors.numpy import save_file

from nbengine import LLM, SamplingParams
from nbengine.config import EngineArgs, EngineConfig
from nbengine.engine.core.core import EngineCore
from nbengine.executor.base import Executor
from nbengine.executor.multiproc import MultiprocExecutor
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.models.checkpoints.files import resolve_model

LIMIT = 1.6
NUM_REQUESTS = 128
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 24
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 512, 1408, 12, 8, 4, 64, 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP=3": {"tensor_parallel_size": 3},
    "PP=2": {"pipeline_parallel_size": 2},
}
STREAMS = 16


class OneStepAtATime(MultiprocExecutor):
    """An executor whose workers are given a step when the one before has been taken in."""

    @property
    def max_concurrent_batches(self) -> int:
        """Return one, however many stages there are."""
        return 1


def write_model(directory: Path) -> None:
    """Write a checkpoint of normal weights of variance 1 / fan-in, the same each time."""
    generator = np.random.default_rng(0)
    shapes = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM)}
    shapes |= {f"self_attn.{name}_proj": (KV_HEADS * HEAD_DIM, HIDDEN) for name in "kv"}
    shapes |= {f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
    shapes |= {"mlp.down_proj": (HIDDEN, INNER)}
    tensors = {"model.norm.weight": np.ones(HIDDEN, np.float32)}
    tensors["model.embed_tokens.weight"] = generator.standard_normal((VOCABULARY, HIDDEN), np.float32)
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            weight = generator.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))


def pipeline_config(directory: Path) -> EngineConfig:
    """Return a configuration of two stages, with room for all requests at once."""
    arguments = EngineArgs(
        str(directory),
        dtype="float32",
        pipeline_parallel_size=2,
        num_gpu_blocks_override=1024,
        max_model_len=128,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    config = arguments.create_engine_config(bound=True)
    return replace(config, model=resolve_model(replace(config.model, tokenizer="none")))


def decoding_rate(core: EngineCore) -> float:
    """Return the tokens a second while all requests decode."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for number in range(NUM_REQUESTS):
        prompt = [(7 * number + 3 * place) % (VOCABULARY - 1) + 1 for place in range(PROMPT_TOKENS)]
        request = EngineCoreRequest(f"r{number}", prompt, params)
        core.add_request(*core.preprocess_add_request(request))
    gc.collect()
    begun: set[str] = set()
    tokens, start = 0, 0.0
    while core.has_work():
        outputs, executed = core.step_fn()
        core.post_step(executed)
        new = [output for sent in outputs.values() for output in sent.outputs if output.new_token_ids]
        if start:
            tokens += len(new)
        begun.update(output.request_id for output in new)
        if not start and len(begun) == NUM_REQUESTS:
            start = time.perf_counter()
    return tokens / (time.perf_counter() - start)


def measure_queue(rounds: int) -> dict[str, Any]:
    """Measure both ways to drive the same two stages, in turn."""
    sides: list[type[Executor]] = [MultiprocExecutor, OneStepAtATime]
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        config = pipeline_config(Path(directory))
        cores = [EngineCore(config, executor) for executor in sides]
        try:
            queued, one_by_one = alternate(rounds, *(partial(decoding_rate, core) for core in cores))
        finally:
            for core in cores:
                core.shutdown()
    return {
        "tokens/s": f"random Llama, PP=2, {NUM_REQUESTS} requests",
        "one step at a time": round(statistics.median(one_by_one), 1),
        "with the queue": round(statistics.median(queued), 1),
        "ratio": round(median_ratio(queued, one_by_one), 3),
        "limit": LIMIT,
    }


def default_model_rate(options: dict[str, Any], rounds: int) -> float:
    """Return the tokens a second of the default model, prompts of 128 tokens included."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1000 + 131 * n + i for i in range(128)]} for n in range(STREAMS)]
    with LLM("smollm2-135m", max_model_len=512, num_gpu_blocks_override=512, **options) as llm:

        def rate() -> float:
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return STREAMS * 64 / (time.perf_counter() - start)

        (rates,) = alternate(rounds, rate)
    return statistics.median(rates)


def main() -> None:
    """Measure the queue's row, with a limit, and one without for each topology of the default model."""
    options = parser(__doc__)
    options.add_argument("--without-default-model", action="store_true", help="only the queue")
    arguments = options.parse_args()
    # There is one core for each stage, in every worker.
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = [measure_queue(arguments.rounds)]
    del os.environ["OMP_NUM_THREADS"]
    if not arguments.without_default_model:
        for name, sizes in TOPOLOGIES.items():
            rate = default_model_rate(sizes, arguments.rounds)
            rows.append({"tokens/s": f"default model, {name}, {STREAMS} requests", "rate": round(rate, 1)})
    report("pipeline and tensor parallel", rows, arguments.json)


if __name__ == "__main__":
    main()
