"""Prompts that are given as embeddings, in the form that the model takes.

This module imports torch, so only the engine core may import it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbengine.errors import RequestError

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def prepare_prompt_embeds(embeds: Any, hidden_size: int, dtype: str) -> Tensor:
    """Convert embeddings to a contiguous CPU tensor [prompt tokens, hidden_size] of the model's `dtype`.

    A tensor that is all this already is not copied.

    Raises:
        RequestError: `embeds` is not a floating-point tensor or array of that shape, or not finite in that
            dtype.
    """
    if isinstance(embeds, np.ndarray):
        given = embeds.dtype.name
    elif isinstance(embeds, Tensor):
        given = str(embeds.dtype).removeprefix("torch.")
    else:
        raise RequestError(f"prompt_embeds must be a tensor or an array, not a {type(embeds).__name__}")
    shape = tuple(embeds.shape)
    if given not in _DTYPES or len(shape) != 2 or shape[1] != hidden_size:
        raise RequestError(
            f"prompt_embeds must be floating-point numbers of shape [prompt tokens, {hidden_size}], "
            f"got {given} of shape {shape}"
        )
    # torch takes no array that is read-only, as those from the wire are, or of the other byte order.
    tensor = embeds.detach() if isinstance(embeds, Tensor) else torch.from_numpy(embeds.astype(given))
    tensor = tensor.to("cpu", getattr(torch, dtype)).contiguous()
    if not torch.isfinite(tensor).all():
        raise RequestError(f"prompt_embeds must be finite in the model's dtype, {dtype}")
    return tensor


def bytes_of(embeds: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as flat bytes."""
    return embeds.view(-1).view(torch.uint8).numpy().data
