"""The attention function that encoders of transformers call in each layer: in both directions, over a flat batch of
whole prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbengine.errors import ModelLoadError
from nbengine.models.families.transformers_attention import WITHOUT_EFFECT
from nbengine.models.layers.encoder_attention import PromptGroup


class PromptAttention:
    """The attention of all layers of an encoder."""

    def __init__(self, architecture: str, on_layer: Callable[[], None]) -> None:
        self._architecture = architecture
        self._on_layer = on_layer
        self._groups: list[PromptGroup] = []
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def begin(self, groups: list[PromptGroup]) -> None:
        """Take note of the prompts of the step that begins."""
        self._groups = groups
        self._masks.clear()

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> Tensor:
        """See `nbengine.models.families.transformers_attention.attention_function`. With a `sliding_window` of w tokens a
        query sees keys that are fewer than w tokens away, before it and behind it.

        Raises:
            ModelLoadError: the layer asks for what is not done here.
        """
        num_tokens = query.shape[2]
        if query.is_meta:
            self._check(module, query, key, attention_mask, is_causal, others)
            return query.new_empty(1, num_tokens, query.shape[1], value.shape[3])
        out = query.new_empty(num_tokens, query.shape[1], value.shape[3])
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]
        shares_keys = key.shape[1] != query.shape[1]
        for group in self._groups:
            padded = [_padded(x, group) for x in rows]
            mask = self._mask(group, sliding_window, query.device)
            attended = F.scaled_dot_product_attention(
                padded[0], padded[1], padded[2], mask, scale=scaling, enable_gqa=shares_keys
            )
            found = attended.transpose(1, 2).flatten(0, 1)
            out[group.start : group.stop] = found if group.scatter is None else found[group.scatter]
        self._on_layer()
        return out[None]

    def _mask(self, group: PromptGroup, window: int | None, device: torch.device) -> Tensor | None:
        key = group.start, window
        if key not in self._masks:
            mask = group.mask
            if window is not None and window < group.length:
                places = torch.arange(group.length, device=device)
                near = (places[:, None] - places).abs() < window
                mask = near if mask is None else mask & near
            self._masks[key] = mask
        return self._masks[key]

    def _check(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        attention_mask: Tensor | None,
        is_causal: bool | None,
        others: dict[str, Any],
    ) -> None:
        feature = ""
        unknown = [name for name, given in others.items() if given is not None and name not in WITHOUT_EFFECT]
        if attention_mask is not None:
            feature = "an attention mask of its own"
        elif getattr(module, "is_causal", True) if is_causal is None else is_causal:
            feature = "attention to earlier tokens only"
        elif unknown:
            feature = f"attention with {', '.join(sorted(unknown))}"
        elif key.shape[2] != query.shape[2]:
            feature = f"queries {list(query.shape)} for keys {list(key.shape)}"
        if feature:
            raise ModelLoadError(f"{self._architecture} cannot run through transformers: it has {feature}")


def _padded(x: Tensor, group: PromptGroup) -> Tensor:
    """Turn [T, heads, size] into [prompts, heads, length, size] of a group."""
    if group.gather is None:
        own = x[group.start : group.stop].view(group.count, group.length, *x.shape[1:])
    else:
        own = x[group.gather]
    return own.transpose(1, 2)
