"""The native decoder against transformers in float32, over the variants that it is parametrised by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-untied": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha-biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-mqa-wide-heads": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama-epsilon": ("Llama", {"rms_norm_eps": 0.3}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}


def logits_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def reloaded(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The saved model as transformers loads it; casting a model instead would round its RoPE frequencies."""
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


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


def test_chunks_and_single_tokens_give_the_logits_of_the_whole(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    oracle = random_model("Llama")
    oracle.save_pretrained(tmp_path)
    runner = make_runner(load(tmp_path))
    tokens, other = random_tokens(30), random_tokens(12, 5)
    steps: list[dict[str, list[int]]] = [
        {"a": tokens[:11]},
        {"a": tokens[11:12], "b": other[:7]},
        {"b": other[7:8], "a": tokens[12:29]},
        {"b": other[8:], "a": tokens[29:]},
    ]
    parts: dict[str, list[Tensor]] = {"a": [], "b": []}
    for step in steps:
        for name, logits in runner.step(step).items():
            parts[name].append(logits)
    torch.testing.assert_close(torch.cat(parts["a"]), logits_of(oracle, tokens), rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.cat(parts["b"]), logits_of(oracle, other), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types_are_nearer_to_float32_than_transformers(
    dtype: torch.dtype, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    random_model("Qwen3", head_dim=16).to(dtype).save_pretrained(tmp_path)
    tokens = random_tokens(100)
    rounded = logits_of(reloaded(tmp_path, dtype), tokens)
    exact = logits_of(reloaded(tmp_path, torch.float32), tokens)
    ours = make_runner(load(tmp_path, dtype)).step({"a": tokens})["a"]
    assert ours.dtype is torch.float32
    assert (ours - exact).abs().mean() < 0.7 * (rounded - exact).abs().mean()


def test_activations_may_be_beyond_float16(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    oracle = random_model("Llama", head_dim=16)
    for layer in oracle.model.layers:
        layer.mlp.up_proj.weight.data *= 2.0**11
        layer.mlp.gate_proj.weight.data *= 2.0**11
        layer.mlp.down_proj.weight.data *= 2.0**-12
    oracle.to(torch.float16).save_pretrained(tmp_path)
    tokens, exact = random_tokens(60), oracle.float()
    gated = []
    oracle.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, inputs: gated.append(inputs[0]))
    expected = logits_of(exact, tokens)
    assert gated[0].abs().max() > torch.finfo(torch.float16).max
    logits = make_runner(load(tmp_path, torch.float16)).step({"a": tokens})["a"]
    # Keys and values are of float16.
    assert (logits - expected).abs().mean() < 1e-3 * expected.abs().mean()


def test_16_bit_weights_widen_exactly(tmp_path: Path, load: Any, make_runner: Any, random_model: Any) -> None:
    random_model("Llama").to(torch.bfloat16).save_pretrained(tmp_path)
    tokens = random_tokens(20)
    logits = make_runner(load(tmp_path, torch.float32)).step({"a": tokens})["a"]
    expected = logits_of(reloaded(tmp_path, torch.float32), tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_sharded_checkpoint_equals_a_single_file(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    oracle = random_model("Llama")
    oracle.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = random_tokens(20)
    logits = make_runner(load(tmp_path)).step({"a": tokens})["a"]
    torch.testing.assert_close(logits, logits_of(oracle, tokens), rtol=0, atol=1e-4)


def test_a_shorter_max_model_len_changes_no_logits(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    oracle = random_model("Llama")
    oracle.save_pretrained(tmp_path)
    tokens = random_tokens(32)
    whole = make_runner(load(tmp_path)).step({"a": tokens})["a"]
    limited = make_runner(load(tmp_path, max_model_len=32)).step({"a": tokens})["a"]
    assert torch.equal(whole, limited)


def test_overrides_of_the_configuration_reach_the_model(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    random_model("Llama").save_pretrained(tmp_path)
    oracle = random_model("Llama", rms_norm_eps=0.5)
    tokens = random_tokens(16)
    logits = make_runner(load(tmp_path, hf_overrides={"rms_norm_eps": 0.5})).step({"a": tokens})["a"]
    torch.testing.assert_close(logits, logits_of(oracle, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("length", "longest"), [(90, 90), (64, 64), (40, None)])
def test_dynamic_scaling_gives_the_logits_of_transformers_for_the_longest_sequence(
    length: int, longest: int | None, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    """Transformers takes the angles of each call's own length; here they are those of `max_model_len`, which are the
    same for a request of that length, and for all requests up to the context of 64 tokens."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    oracle = random_model("Llama", rope_parameters=rope, max_position_embeddings=64)
    oracle.save_pretrained(tmp_path)
    runner = make_runner(load(tmp_path, **({} if longest is None else {"max_model_len": longest})))
    tokens = random_tokens(length)
    logits = runner.step({"request": tokens})["request"]
    torch.testing.assert_close(logits, logits_of(oracle, tokens), rtol=0, atol=1e-4)
