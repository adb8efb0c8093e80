"""Checkpoints with random weights for the shapes, and what of them a token reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from families.shapes import BITS, Shape
from tests.support.random_models import save_tokenizer

_EXPERTS = (".experts.",)


def make(shape: Shape, folder: Path) -> Path:
    """Write a checkpoint in bfloat16, tensor by tensor, so that memory holds no second copy; return its folder."""
    import transformers

    model_class = getattr(transformers, f"{shape.kind}ForCausalLM")
    config = model_class.config_class(**shape.settings)
    config.architectures, config.dtype = [model_class.__name__], "bfloat16"
    with torch.device("meta"):
        model = model_class._from_config(config)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_tokenizer(folder)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensors[name] = _random(name, tuple(parameter.shape), generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) < 2:
        is_factor = any(word in name for word in ("norm", "scalar", "scale"))
        return torch.full(shape, float(is_factor), dtype=torch.bfloat16)
    made = torch.empty(shape, dtype=torch.bfloat16)
    return made.normal_(0.0, shape[-1] ** -0.5, generator=generator)


def bytes_of_a_token(folder: Path, kind: str) -> float:
    """Return the bytes of weights that a token of one stream reads, all matrices rounded to `kind`: of the experts those
    that compute it, and of embeddings none."""
    from safetensors import safe_open

    config: dict[str, Any] = _config(folder)
    chosen = config.get("num_experts_per_tok") or config.get("top_k_experts") or 1
    experts = config.get("num_experts") or config.get("n_routed_experts") or 1
    weights = 0.0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            size = torch.Size(file.get_slice(name).get_shape()).numel()
            is_embedding = "embed_tokens" in name and not (
                config.get("tie_word_embeddings") and name.endswith("embed_tokens.weight")
            )
            if not is_embedding:
                weights += size * (chosen / experts if any(part in name for part in _EXPERTS) else 1)
    return weights * BITS[kind] / 8


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
