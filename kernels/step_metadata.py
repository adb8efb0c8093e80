"""The metadata of one step's batch for a model whose layers are in several cache groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The metadata of one step for each group of layers, as `nbengine.kv_cache.specs.CacheGroups` numbers them.

    A model with a single group, of attention layers, takes its `AttentionMetadata` as it is.
    """

    groups: tuple[Any, ...]
    """`AttentionMetadata` for each group of attention layers; then, if there are recurrent layers, theirs."""
