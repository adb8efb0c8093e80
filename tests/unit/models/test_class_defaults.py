"""Entries that a configuration leaves out, and those that a class of transformers does not read, count as there."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import transformers

from nbengine.models.configs.hf_config import with_text_config
from nbengine.models.registry import DECODERS, decoder_config

STATED: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "max_position_embeddings": 128,
}
ALSO_STATED = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Mamba2ForCausalLM": {"num_heads": 8},
    # Released models have a projection of their own, which their files do not say.
    "Mistral3ForConditionalGeneration": {"tie_word_embeddings": False},
}


NULLS: list[dict[str, Any]] = [{"num_key_value_heads": None}, {"head_dim": None}, {"sliding_window": None}]
WITH_NULLS = ("Qwen2", "Qwen2VL", "Qwen3", "Bamba", "SmolLM3", "Ernie4_5", "SeedOss")


@pytest.mark.parametrize(
    ("name", "also"),
    [
        *((name, {}) for name in DECODERS),
        *(
            (name, {**each, "use_sliding_window": True, "max_window_layers": 0})
            for name in DECODERS
            for each in [*NULLS, {}]
            if name.startswith(tuple(f"{kind}For" for kind in WITH_NULLS))
            and not (name == "Qwen3ForCausalLM" and "head_dim" in each)
        ),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True}),
    ],
)
def test_what_a_configuration_leaves_out_is_what_transformers_assumes(
    name: str, also: dict[str, Any]
) -> None:
    config_class = getattr(transformers, name).config_class
    stated = {**STATED, **ALSO_STATED.get(name, {}), "max_position_embeddings": 8192, **also}
    if "text_config" in config_class.sub_configs:
        whole = config_class(text_config=stated, **ALSO_STATED.get(name, {})).to_dict()
    else:
        whole = config_class(**stated).to_dict()
    architectures = {"architectures": [name]}
    found, expected = (decoder_config({**with_text_config(hf), **architectures}) for hf in (stated, whole))
    assert found == expected


NOTHING_TURNS = ("Mamba2", "NemotronH", "DeepseekV2", "DeepseekV3", "Glm4MoeLite")
"""The beginnings of classes without a rotary embedding, or whose heads say themselves which part turns."""


@pytest.mark.parametrize("name", [name for name in DECODERS if not name.startswith(NOTHING_TURNS)])
def test_a_part_of_a_head_is_turned_where_the_class_of_transformers_reads_it(name: str) -> None:
    source = Path(inspect.getfile(getattr(transformers, name))).read_text()
    hf = {**STATED, "architectures": [name], "head_dim": 64}
    sizes = [decoder_config({**hf, "partial_rotary_factor": part}).rotary_dim for part in (0.25, 0.75)]
    if name.startswith("Bamba"):
        assert sizes == [32, 32]
    else:
        assert sizes == ([16, 48] if "partial_rotary_factor" in source else [0, 0])


IGNORED = {
    "OlmoForCausalLM": {"rms_norm_eps": 0.5},
    "GraniteMoeForCausalLM": {"mlp_bias": True},
    "Qwen3VLForConditionalGeneration": {
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 0,
    },
    "Qwen3VLMoeForConditionalGeneration": {"use_sliding_window": True, "sliding_window": 16},
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_a_class_of_transformers_does_not_read_changes_nothing(name: str) -> None:
    hf = {**STATED, "architectures": [name]}
    assert decoder_config({**hf, **IGNORED[name]}) == decoder_config(hf)


def test_a_part_that_bamba_turns_stands_within_what_is_said_of_the_rotary_embedding() -> None:
    hf = {**STATED, "architectures": ["BambaForCausalLM"], "head_dim": 64}
    assert decoder_config({**hf, "rope_parameters": {"partial_rotary_factor": 0.25}}).rotary_dim == 16
