"""Small random models of transformers on the disk, and a check that given tokens are their greedy ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tokenizers import Tokenizer, models

from tests.unit.models.conftest import SIZES

VOCABULARY = 96
FIRST = 3
"""The first token that means nothing."""
SET = ("sinks", "norm.weight", "layernorm.weight", "router.scale", "per_expert_scale")
"""The endings of parameters that classes set to one value."""
ROUNDING = 1e-4
"""The most that two orders of the same float32 sums change in a logit."""

_checked: WeakKeyDictionary[Any, dict[tuple[int, ...], list[int]]] = WeakKeyDictionary()
"""Right answers by their prompts, of each model."""


def save_random(kind: str, settings: dict[str, Any], directory: Path) -> Any:
    """Save a random model whose class begins with `kind`, with a tokenizer that nobody asks; gives the model."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    stated = {**SIZES, "initializer_range": 0.3, "tie_word_embeddings": False, **settings}
    torch.manual_seed(0)
    # Other implementations leave out soft caps and sinks of attention, and biases of experts.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = model_class._from_config(model_class.config_class(**stated), **plain)
    model = model.float().eval()
    # Weights of their own for the parameters that a class sets to one value.
    for name, parameter in model.named_parameters():
        if name.endswith(SET) or "layernorm_" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.3 * torch.randn_like(buffer)
    # A cache of transformers does not take every kind of layers.
    model.config.use_cache = False
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer that nobody asks."""
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, "t0")).save(
        str(directory / "tokenizer.json")
    )
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def assert_greedy(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Check that each of `tokens` is the likeliest after the prompt and those before it.

    Logits of these models spread by more than 1. Of thousands of tokens two may be nearer to each other than the
    rounding of float32 can tell. The beginning of an answer that was checked is right, too.
    """
    assert tokens
    checked = _checked.setdefault(model, {})
    if list(tokens) == checked.get(tuple(prompt), [])[: len(tokens)]:
        return
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    behind = (logits.max(-1).values - chosen).tolist()
    assert max(behind) < ROUNDING, f"{len(prompt)} prompt tokens: the answer is behind by {behind}"
    checked[tuple(prompt)] = list(tokens)


def random_tokens(length: int, seed: int = 0) -> list[int]:
    """Return `length` tokens that mean nothing, always the same for a seed."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(FIRST, VOCABULARY, (length,), generator=generator).tolist()
