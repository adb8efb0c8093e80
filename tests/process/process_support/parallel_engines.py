"""Engines of several workers on small models, and what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from process_support.other_user import EndsWatch
from process_support.tiny_models import TinyModel

from nbengine import LLM, AsyncLLM
from tests.support.thorough import amount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_MODEL_LEN = 160
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    # A few requests fit at a time, so that they are preempted.
    "num_gpu_blocks_override": 40,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
}
CHUNKS_OF_16 = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "num_gpu_blocks_override": 16}


@dataclass(frozen=True)
class Topology:
    """The number of workers, and the model that they share."""

    tp: int
    pp: int
    model: TinyModel
    options: Mapping[str, Any] = field(default_factory=dict)


BIASES = {"attention_bias": True, "mlp_bias": True}
FEW_TOPOLOGIES = {
    "tp4-replicated-kv-ahead": Topology(
        4, 1, TinyModel("Qwen3", 8, 2, tied=True), {**CHUNKS_OF_16, "async_scheduling": True}
    ),
    "tp2-pp2-biases": Topology(2, 2, TinyModel("Llama", 4, 4, settings=BIASES)),
}
"""Every way to divide a model and to schedule once: each engine is half a dozen processes. Stages of one worker each are
in `data_parallel_engines.py`; threads as ranks prove each kind of model's division."""
TOPOLOGIES = amount(
    FEW_TOPOLOGIES,
    thorough={
        **FEW_TOPOLOGIES,
        "pp2": Topology(1, 2, TinyModel("Qwen2", 6, 2, tied=True), CHUNKS_OF_16),
        "tp2": Topology(2, 1, TinyModel("Llama", 4, 2)),
        "tp2-ahead": Topology(2, 1, TinyModel("Llama", 8, 8, tied=True), {"async_scheduling": True}),
        "tp4-replicated-kv": Topology(4, 1, TinyModel("Qwen3", 8, 2, tied=True), CHUNKS_OF_16),
        "tp2-pp2": Topology(2, 2, TinyModel("Qwen3", 6, 2)),
        "tp4-pp2": Topology(4, 2, TinyModel("Llama", 4, 4, settings=BIASES)),
    },
)
OF_TENSORS = amount(["tp4-replicated-kv-ahead"], thorough=list(TOPOLOGIES))
OF_STAGES = amount(["tp2-pp2-biases"], thorough=list(TOPOLOGIES))
"""For what does not depend on how a model is divided beyond this: where ranks draw, and what passes from stage to stage."""


@dataclass(frozen=True)
class Case:
    """A running engine of several workers, and what it is compared with."""

    topology: Topology
    directory: Path
    oracle: PreTrainedModel
    engine: AsyncLLM
    alone: LLM
    watch: EndsWatch
