"""What is asked and answered about engines that have not been started: whether they fit on this machine."""

from __future__ import annotations

import msgspec

from nbengine.config import EngineConfig


class FitQuestion(msgspec.Struct):
    """How would engines with these configurations, all of one model, come out here?"""

    configs: list[EngineConfig]


class MemoryPlace(msgspec.Struct, frozen=True):
    """A memory: the machine's, or a GPU's. `total` and `free` are bytes."""

    name: str
    total: int
    free: int


class SizePlan(msgspec.Struct):
    """How an engine would come out; sizes in bytes, of all workers of an engine core together as in `EngineReady`."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    block_size: int
    dtype: str = ""
    weights_bytes: int = 0
    page_bytes: int = 0
    """Of a block of the KV cache."""
    num_blocks: int = 0
    max_model_len: int = 0
    problem: str = ""
    """Why it would not start; empty if it would."""


class FitAnswer(msgspec.Struct):
    """The machine, and a plan for each configuration; or the problem that all of them have."""

    device: str = ""
    places: list[MemoryPlace] = []
    context_limit: int = 0
    """The most tokens that the model was made for."""
    plans: list[SizePlan] = []
    problem: str = ""
