"""Questions whether engines that have not been started would fit on this machine, and their answers."""

from __future__ import annotations

import msgspec

from nbengine.config import EngineConfig


class FitQuestion(msgspec.Struct):
    """The question how engines with these configurations, all of one model, would come out here."""

    configs: list[EngineConfig]


class MemoryPlace(msgspec.Struct, frozen=True):
    """A memory: the machine's, or a GPU's. `total` and `free` are bytes."""

    name: str
    total: int
    free: int


class SizePlan(msgspec.Struct):
    """The sizes that an engine would have, in bytes,
    of all workers of an engine core together as in `EngineReady`."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    block_size: int
    dtype: str = ""
    weights_bytes: int = 0
    page_bytes: int = 0
    """Bytes of a block of the KV cache."""
    num_blocks: int = 0
    max_model_len: int = 0
    rules: list[tuple[str, int]] = []
    """The kind and size of each layer's `LayerRule`, which says what the layer keeps of a request."""
    slot_bytes: int = 0
    """Bytes of one request's recurrent state."""
    num_state_slots: int = 0
    problem: str = ""
    """The reason why the engine would not start; empty if it would."""


class FitAnswer(msgspec.Struct):
    """The machine, and a plan for each configuration; or the problem that all of them have."""

    device: str = ""
    places: list[MemoryPlace] = []
    context_limit: int = 0
    """The most tokens that the model was made for."""
    plans: list[SizePlan] = []
    problem: str = ""


class FitQuestions(msgspec.Struct):
    """Questions about several models; with `measures` it is also asked how fast the memory is read."""

    questions: list[FitQuestion]
    measures: bool = False


class FitAnswers(msgspec.Struct):
    """An answer to each of the questions, and what the machine is like."""

    answers: list[FitAnswer]
    device: str = ""
    places: list[MemoryPlace] = []
    bytes_per_second: float = 0.0
    """The bytes that the device reads of its memory in a second; 0 if that was not measured."""
