"""A worker compiles at its start: no step of a model with recurrent layers waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from nbengine.kernels.cpu import jit
from nbengine.models.checkpoints.files import resolve_model
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from nbengine.worker.worker import Worker
from tests.support.random_models import save_random

LINEAR, FULL = "linear_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {
        "layer_types": [LINEAR, FULL, LINEAR],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "GraniteMoeHybrid": {
        "layer_types": [LINEAR, FULL, LINEAR],
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_state": 24,
        "mamba_n_groups": 2,
        "position_embedding_type": "rope",
    },
    "Lfm2": {"layer_types": ["conv", FULL, "conv"], "block_auto_adjust_ff_dim": False},
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that are compiled, or taken from the disk, while the test runs."""
    found: list[str] = []

    def note(processor: jit.Processor) -> Any:
        found.append(processor.name)
        return machine(processor)

    machine = jit._target_machine
    monkeypatch.setattr(jit, "_target_machine", note)
    return found


def step(number: int) -> SchedulerOutput:
    """The first step computes a prompt of 5 tokens of one request and of one token of another, the others a token
    of each."""
    params, names = SamplingParams(temperature=0, max_tokens=9), ("a", "b")
    prompts = {"a": [3, 4, 5, 6, 7], "b": [8]}
    if number == 0:
        new = [NewRequestData(name, prompts[name], params, [index], 0) for index, name in enumerate(names)]
        counts = {name: len(prompts[name]) for name in names}
        slots = {name: (index, -1) for index, name in enumerate(names)}
        return SchedulerOutput(new, CachedRequestData(), counts, 6, set(), state_slots=slots)
    computed = [len(prompts[name]) + number - 1 for name in names]
    cached = CachedRequestData(list(names), set(), [None, None], computed)
    return SchedulerOutput([], cached, dict.fromkeys(names, 1), 2, set())


ASKED = ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int4"})


@pytest.mark.parametrize("asked", ASKED, ids=["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_is_compiled_after_the_start(
    kind: str, asked: dict[str, Any], compiled: list[str], tmp_path: Path
) -> None:
    # Sizes that no other test has: what is compiled stays in the process.
    heads = 3 + len(ASKED) * list(MODELS).index(kind) + ASKED.index(asked)
    sizes = {
        "hidden_size": 32 * heads,
        "intermediate_size": 160,
        "head_dim": 32,
        "num_attention_heads": heads,
    }
    save_random(kind, {**sizes, "num_key_value_heads": 1, "pad_token_id": 0, **MODELS[kind]}, tmp_path)
    model = resolve_model(ModelConfig(model=str(tmp_path), tokenizer="none", device="cpu", **asked))
    cache, scheduler = CacheConfig(block_size=16), SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32)
    worker = Worker(EngineConfig(model, cache=cache, scheduler=scheduler))
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(8, num_slots=3)
    assert compiled
    compiled.clear()
    for number in range(3):
        assert worker.execute_model(step(number)) is None
        output = worker.sample_tokens()
        assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 1]
    assert not compiled
