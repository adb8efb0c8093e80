"""DeepSeek's models read from GGUF files, written as llama.cpp's converter would, against transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, YARN
from gguf import GGMLQuantizationType

from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import hf_config
from nbengine.models.checkpoints.loader import load_decoder
from nbengine.models.registry import decoder_config
from nbengine.runtime.progress import Reporter


@dataclass(frozen=True)
class Written:
    """A case of `family_cases` as a file, with what the converter says beside the usual, and does to tensors."""

    case: str
    arch: str
    metadata: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    variant: dict[str, Any] = field(default_factory=dict)


LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_rope_head_dim": 8}
MSCALE = {**YARN, "mscale": 1.2, "mscale_all_dim": 1.2}
DEEPSEEK = {
    "deepseek2.attention.kv_lora_rank": 64,
    "deepseek2.rope.dimension_count": 8,
    "deepseek2.expert_count": 8,
    "deepseek2.expert_used_count": 3,
    "deepseek2.expert_shared_count": 2,
    "deepseek2.expert_feed_forward_length": 32,
    "deepseek2.leading_dense_block_count": 1,
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 4.0,
    "deepseek2.rope.scaling.original_context_length": 64,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.12,
}
FILES = {
    # Older files have keys and values in one projection, and sizes of a head of their own.
    "deepseek v2": Written(
        "deepseek v2",
        "deepseek2",
        {**DEEPSEEK, "deepseek2.expert_weights_scale": 1.0},
        {**LATENT, "rope_parameters": MSCALE},
        {"lengths": (40, 32), "dense": "mlp.gate."},
    ),
    "deepseek v3": Written(
        "deepseek v3",
        "deepseek2",
        {
            **DEEPSEEK,
            "deepseek2.attention.q_lora_rank": 32,
            "deepseek2.attention.key_length_mla": 40,
            "deepseek2.attention.value_length_mla": 32,
            "deepseek2.expert_weights_scale": 2.5,
            "deepseek2.expert_weights_norm": True,
            "deepseek2.expert_gating_func": 2,
            "deepseek2.expert_group_count": 4,
            "deepseek2.expert_group_used_count": 2,
            "deepseek2.rope.scaling.yarn_beta_fast": 4.0,
        },
        {**LATENT, "q_lora_rank": 32, "rope_parameters": {**MSCALE, "beta_fast": 4.0}},
        {"lengths": (72, 64), "splits_latents": True, "dense": "mlp.gate."},
    ),
    # One group of experts, which the converter does not state, and nothing stretched.
    "glm4 moe lite": Written(
        "glm4 moe lite",
        "deepseek2",
        {
            **{key: value for key, value in DEEPSEEK.items() if ".scaling." not in key},
            "deepseek2.attention.q_lora_rank": 32,
            "deepseek2.attention.key_length_mla": 40,
            "deepseek2.attention.value_length_mla": 32,
            "deepseek2.expert_weights_scale": 1.8,
            "deepseek2.expert_weights_norm": True,
            "deepseek2.expert_gating_func": 2,
        },
        {
            **LATENT,
            "q_lora_rank": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "routed_scaling_factor": 1.8,
        },
        {"lengths": (72, 64), "splits_latents": True, "dense": "mlp.gate."},
    ),
}


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0], ids=["f32", "q8_0"])
@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_with_latents_gives_the_logits_of_what_was_converted(
    name: str,
    kind: GGMLQuantizationType,
    tmp_path: Path,
    make_runner: Any,
    random_model: Any,
    write_gguf: Any,
    gguf_variant: Any,
    compared: Any,
) -> None:
    written = FILES[name]
    case = CASES[written.case]
    oracle = random_model(case.kind, **{**case.settings, **written.settings})
    variant = gguf_variant(written.arch, kind, metadata=written.metadata, **written.variant)
    path = write_gguf(tmp_path / "model.gguf", oracle, variant)
    config = decoder_config(hf_config(read_header(path)))
    model = load_decoder(
        config,
        (path,),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=None,
        report=Reporter(None, "load"),
    )
    tokens = torch.randint(3, 96, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    logits = make_runner(model).step({"a": tokens})["a"]
    if kind is GGMLQuantizationType.F32:
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
    else:
        # Eight bits a weight: far nearer than another tensor, or another order of its rows, would come.
        assert (logits - expected).norm() < 0.4 * expected.norm()
    compared(oracle, "gguf")
