"""This module checks prompts that are given as embeddings, without importing torch: a prompt that is a tensor
has brought torch along."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from nbengine.errors import InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    import numpy as np
    import torch

    PromptEmbeds = torch.Tensor | np.ndarray[Any, Any]

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def checked_embeds(embeds: Any, hidden_size: int) -> PromptEmbeds:
    """Return `embeds` if it is a tensor or an array [prompt tokens, hidden_size] of finite floating-point
    numbers.

    The result has the same memory, without autograd's history.

    Raises:
        InvalidArgumentError: it is not one; the message says in what respect.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(embeds, torch.Tensor):
        embeds, isfinite = embeds.detach(), torch.isfinite
    elif numpy is not None and isinstance(embeds, numpy.ndarray):
        isfinite = numpy.isfinite
    else:
        raise InvalidTypeError("prompt_embeds", embeds, "a torch tensor or a numpy array")
    shape = tuple(embeds.shape)
    if len(shape) != 2 or shape[1] != hidden_size or not shape[0]:
        raise InvalidArgumentError(
            "prompt_embeds", shape, f"of shape [prompt tokens, hidden size {hidden_size}], at least one token"
        )
    dtype = getattr(embeds.dtype, "name", None) or str(embeds.dtype).removeprefix("torch.")
    if dtype not in _DTYPES or str(getattr(embeds, "layout", "torch.strided")) != "torch.strided":
        raise InvalidTypeError("prompt_embeds", dtype, "dense, of dtype " + ", ".join(_DTYPES))
    if not bool(isfinite(embeds).all()):
        raise InvalidArgumentError("prompt_embeds", embeds, "finite")
    return cast("PromptEmbeds", embeds)
