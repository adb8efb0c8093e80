"""Llama 4: its configuration says which layers turn, see chunks and have experts, and logits choose experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CHUNKED, FULL, LLAMA_4

from nbengine.errors import ModelLoadError
from nbengine.models.configs.decoder_config import LayerConfig, QueryGrowth
from nbengine.models.registry import decoder_config, has_experts
from tests.unit.models.conftest import SIZES

HF: dict[str, Any] = {**SIZES, **LLAMA_4, "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 6}
TURNED_CHUNK, PLAIN = LayerConfig("chunk", 8, 0), LayerConfig("full", 0, None)


def test_every_fourth_layer_sees_all_and_turns_nothing_unless_the_configuration_says_otherwise() -> None:
    usual = decoder_config(HF)
    assert usual.layers == (TURNED_CHUNK,) * 3 + (PLAIN,) + (TURNED_CHUNK,) * 2
    assert usual.query_growth == QueryGrowth(5, 0.6)
    stated = decoder_config({**HF, "no_rope_layers": [0, 1] * 3, "layer_types": [CHUNKED, FULL] * 3})
    assert stated.layers == (LayerConfig("chunk", 8, None), LayerConfig()) * 3
    assert decoder_config({**HF, "attn_temperature_tuning": 4}).query_growth == usual.query_growth
    assert decoder_config({**HF, "attn_temperature_tuning": False}).query_growth is None


@pytest.mark.parametrize("size", [None, SIZES["max_position_embeddings"]])
def test_chunks_that_hide_nothing_are_none(size: int | None) -> None:
    found = decoder_config({**HF, "attention_chunk_size": size})
    assert {rule.kind for rule in found.cache_rules()} == {"full"}


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"interleave_moe_layer_step": 2}, [1, 3, 5]),
        ({"interleave_moe_layer_step": 2, "moe_layers": [0, 4]}, [0, 4]),
        ({"interleave_moe_layer_step": 7}, []),
        ({"interleave_moe_layer_step": 0, "moe_layers": [], "num_local_experts": 0}, []),
    ],
)
def test_layers_with_experts_are_those_of_transformers(settings: dict[str, Any], layers: list[int]) -> None:
    from transformers import Llama4TextConfig

    hf = {**HF, **settings}
    moe = decoder_config(hf).moe
    assert [index for index in range(6) if moe is not None and moe.has_experts(index)] == layers
    assert has_experts(hf) is bool(layers)
    stated = Llama4TextConfig(**{key: value for key, value in hf.items() if key != "architectures"})
    assert stated.moe_layers == layers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"no_rope_layers": [1, 1]}, "no_rope_layers must be a list of 6 numbers, got "),
        ({"no_rope_layers": 4}, "no_rope_layers must be a list of 6 numbers, got 4"),
        (
            {"layer_types": ["sliding_attention"] * 6},
            "layer_types must be a list of 6 times 'full_attention' or",
        ),
        ({"layer_types": [FULL]}, "layer_types must be a list of 6 times"),
        ({"moe_layers": "all"}, "moe_layers must be a list of integers, got 'all'"),
        ({"attention_chunk_size": 0}, "attention_chunk_size must be a positive integer, got 0"),
        ({"floor_scale": 0}, "floor_scale must be a positive integer, got 0"),
        (
            {"num_experts_per_tok": 5},
            r"num_experts_per_tok \(5\) must be at most the number of experts \(4\)",
        ),
    ],
)
def test_values_that_say_nothing_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        decoder_config({**HF, **settings})


def test_experts_whose_scores_are_all_one_are_told_apart_by_their_logits(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    oracle = random_model("Llama4", **LLAMA_4)
    with torch.no_grad():
        for layer in oracle.model.layers:
            layer.feed_forward.router.weight.mul_(100)
    oracle.save_pretrained(tmp_path)
    tokens = list(range(3, 60))
    found = make_runner(load(tmp_path)).step({"a": tokens})["a"]
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
