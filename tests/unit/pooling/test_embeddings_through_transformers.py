"""Embeddings of an encoder without a family, through the engine, against its class of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import ModernBertConfig, ModernBertModel, PreTrainedModel

from nbengine import LLM, PoolingParams
from nbengine.config import ModelConfig
from nbengine.errors import InvalidArgumentError
from nbengine.models.checkpoints.files import resolve_model


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """A ModernBERT with windows whose authors take the mean of the states, without normalising it."""
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        local_attention=8,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    oracle = ModernBertModel._from_config(config, attn_implementation="eager").float().eval()
    oracle.save_pretrained(tmp_path)
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    source = Path(resolve_model(ModelConfig("random-tiny")).directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path, oracle


@pytest.mark.parametrize("budget", [512, 100])
def test_vectors_are_those_of_transformers_whatever_the_batch(
    saved: tuple[Path, PreTrainedModel], budget: int
) -> None:
    directory, oracle = saved
    chooser = Random(2)
    prompts = [
        {"prompt_token_ids": [chooser.randrange(3, 250) for _ in range(length)]}
        for length in (1, 33, 7, 100, 8, 9, 9, 64, 2)
    ]
    with torch.inference_mode():
        states = [
            oracle(torch.tensor([prompt["prompt_token_ids"]])).last_hidden_state[0].numpy()
            for prompt in prompts
        ]
    with LLM(str(directory), multiprocess=False, max_num_batched_tokens=budget, max_model_len=100) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        params = PoolingParams(pooling="cls", normalize=True)
        firsts = llm.embed(prompts, pooling_params=params, use_tqdm=False)
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            awake = llm.embed(prompts[:2], use_tqdm=False)
        (worker,) = llm.llm_engine.ready.workers
        assert llm.get_supported_tasks() == ("embed", "score", "encode")
        with pytest.raises(InvalidArgumentError, match="task must be one of embed, score, encode"):
            llm.generate("x", use_tqdm=False)
    assert worker.implementation.startswith("ModernBertModel of transformers 5")
    for output, first, own in zip(outputs, firsts, states, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, own.mean(0), rtol=0, atol=1e-5)
        unit = own[0] / np.linalg.norm(own[0])
        np.testing.assert_allclose(first.outputs.embedding, unit, rtol=0, atol=1e-5)
    for output, own in zip(awake, states, strict=False):
        np.testing.assert_allclose(output.outputs.embedding, own.mean(0), rtol=0, atol=1e-5)
