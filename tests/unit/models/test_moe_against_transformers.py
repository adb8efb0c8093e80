"""Mixtures of experts on one rank against transformers in float32, over families and shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 56}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-odd-top1": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}),
    "mixtral-tied-all-chosen": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "mixtral-relu": ("Mixtral", {"num_local_experts": 4, "hidden_act": "relu"}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16}),
    "qwen3-moe-renormalised": ("Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-bias-some-dense": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "attention_bias": True, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-top1-of-7": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "num_experts": 7, "num_experts_per_tok": 1},
    ),
    "qwen3-moe-every-second": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "decoder_sparse_step": 2}),
    "qwen3-moe-one-expert": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "num_experts": 1, "num_experts_per_tok": 1},
    ),
    "qwen2-moe": ("Qwen2Moe", SHARED),
    "qwen2-moe-gelu": ("Qwen2Moe", {**SHARED, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2-moe-renormalised-of-9": ("Qwen2Moe", {**SHARED, "num_experts": 9, "norm_topk_prob": True}),
    "qwen2-moe-no-bias-some-dense": (
        "Qwen2Moe",
        {**SHARED, "qkv_bias": False, "decoder_sparse_step": 2, "mlp_only_layers": [2]},
    ),
}
FORMATS = {"one tensor an expert": True, "all experts of a layer in one": False}


def logits_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_logits_of_transformers(
    variant: str, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    kind, settings = VARIANTS[variant]
    oracle = random_model(kind, **settings)
    oracle.save_pretrained(tmp_path)
    runner = make_runner(load(tmp_path))
    requests = {"long": random_tokens(60), "one": random_tokens(1, 2), "short": random_tokens(9, 3)}
    logits = runner.step(requests)
    for name, tokens in requests.items():
        expected = logits_of(oracle, tokens)
        torch.testing.assert_close(logits[name], expected, rtol=0, atol=1e-4)
        assert logits[name].argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Qwen2Moe"])
def test_both_formats_of_checkpoints_have_the_same_weights(
    kind: str, tmp_path: Path, load: Any, random_model: Any
) -> None:
    settings = {"num_local_experts": 5} if kind == "Mixtral" else {**SHARED, "num_experts": 5}
    oracle = random_model(kind, **settings)
    models = []
    for name, is_original in FORMATS.items():
        oracle.save_pretrained(tmp_path / name, save_original_format=is_original)
        models.append(load(tmp_path / name).weight_slots())
    one, other = models
    assert one.keys() == other.keys()
    for name, slot in one.items():
        assert torch.equal(slot.tensor, other[name].tensor)
    assert torch.equal(
        one["model.layers.1.mlp.experts.3.up_proj.weight"].tensor,
        oracle.model.layers[1].mlp.experts.gate_up_proj[3].chunk(2)[1],
    )


def test_classifiers_give_the_labels_of_transformers(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    settings = {**EXPERTS, "head_dim": 16, "num_labels": 3, "pad_token_id": 0}
    oracle = random_model("Qwen3Moe", "ForSequenceClassification", **settings)
    oracle.save_pretrained(tmp_path)
    model, tokens = load(tmp_path), random_tokens(12)
    hidden = make_runner(model).hidden({"a": tokens})["a"]
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits
        torch.testing.assert_close(model.classify(hidden[-1:]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types_are_nearer_to_float32_than_transformers(
    dtype: torch.dtype, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    random_model("Qwen2Moe", **SHARED).to(dtype).save_pretrained(tmp_path)
    tokens = random_tokens(100)
    auto = transformers.AutoModelForCausalLM
    rounded, exact = (
        logits_of(
            auto.from_pretrained(tmp_path, dtype=kind, attn_implementation="eager").eval(),
            tokens,
        )
        for kind in (dtype, torch.float32)
    )
    ours = make_runner(load(tmp_path, dtype)).step({"a": tokens})["a"]
    assert ours.dtype is torch.float32
    assert (ours - exact).abs().mean() < 0.7 * (rounded - exact).abs().mean()
