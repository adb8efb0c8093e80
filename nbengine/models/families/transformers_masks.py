"""This module tells what the masks that a class of transformers makes let each layer's queries see.

Our attention function gets no masks, and classes differ in where they say what a mask would have: in an argument of each
layer's attention, in `layer_types`, or in the mask alone. So a model without memory runs once with an attention function
for which the class makes its masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbengine.errors import ModelLoadError
from nbengine.kv_cache.specs import FULL, LayerRule
from nbengine.models.families.transformers_attention import attention_function

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "nbengine-masks"
"""The name of the attention function for which classes make masks."""
_RULE = "nbengine_rule"
_LATER = 1 << 20
"""A position behind all that a rule's size could tell from others."""


class MaskProbe:
    """A handler that notes which rule the mask of each layer has (`transformers_attention.handle`)."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self.rules: dict[int, LayerRule] = {}
        """By the layers' numbers; a layer whose mask is none of those that transformers made is left out."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **_: Any,
    ) -> Tensor:
        """See `transformers_attention.attention_function`.

        Raises:
            ModelLoadError: the layer's mask lets queries see what none of our rules does.
        """
        del key
        # Layers may take a part of the mask, which is a view of it.
        made = {} if attention_mask is None else vars(_whole(attention_mask))
        if _RULE in made:
            rule: LayerRule | None = made[_RULE]
            if rule is None:
                raise ModelLoadError(
                    f"{self._architecture} cannot run through transformers: in layer {module.layer_idx} it has a mask that "
                    "is neither causal nor one of a window or of chunks"
                )
            self.rules[module.layer_idx] = rule  # type: ignore[index]
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@contextlib.contextmanager
def masks_made(model: PreTrainedModel) -> Iterator[None]:
    """Have a model without memory make masks for its layers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, _mask)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(each, each._attn_implementation_internal) for each in configs.values()]
    for each, _ in before:
        each._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for each, implementation in before:
            each._attn_implementation_internal = implementation


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    **_: Any,
) -> Tensor:
    """Return a mask without numbers that knows its rule; None: it is not one of ours."""
    made = torch.empty((batch_size, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    vars(made)[_RULE] = _recognised(mask_function, local_size)
    return made


def _whole(mask: Tensor) -> Tensor:
    return mask if mask._base is None else mask._base


def _recognised(mask_function: Callable[..., Any], size: int | None) -> LayerRule | None:
    """Return the rule of a function that says whether a query sees a key, given both positions; None: it is not one that
    our attention has."""
    rule = FULL if size is None else LayerRule("window", size)
    edge = size or 2
    positions = (0, 1, edge - 1, edge, edge + 1, 2 * edge, _LATER)
    try:
        as_said = all(
            bool(mask_function(*_indexes(0, 0, query, key))) is _sees(rule, query, key)
            for query in positions
            for key in positions
        )
    except NotImplementedError:
        # Chunks begin behind the padding of a sequence, whose length is a tensor without a number here.
        return None if size is None else LayerRule("chunk", size)
    return rule if as_said else None


def _indexes(*numbers: int) -> Iterator[Tensor]:
    return (torch.tensor(number, device="cpu") for number in numbers)


def _sees(rule: LayerRule, query: int, key: int) -> bool:
    return key <= query and (rule.kind == "full" or key > query - rule.size)
