"""Engines of several engine cores on small models, most of them with experts, and what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from process_support.other_user import EndsWatch
from process_support.parallel_engines import OPTIONS
from process_support.tiny_models import TinyModel

from nbengine import LLM, AsyncLLM
from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model
from tests.support.thorough import amount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIXTRAL = TinyModel("Mixtral", 4, 2, settings={"num_local_experts": 4, "num_experts_per_tok": 2})
QWEN3 = TinyModel(
    "Qwen3Moe",
    4,
    2,
    settings={
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
)
QWEN2 = TinyModel(
    "Qwen2Moe",
    4,
    2,
    tied=True,
    settings={
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
)


@dataclass(frozen=True)
class Topology:
    """The numbers of engine cores and workers, and their model; None is random-tiny-moe."""

    dp: int
    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False
    model: TinyModel | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_dense(self) -> bool:
        """Return whether the engine cores are independent of each other."""
        return self.model is not None and self.model.kind == "Llama"

    def start(self, model: str, name: str, **options: Any) -> AsyncLLM:
        """The engine."""
        return AsyncLLM(
            model,
            name=name,
            data_parallel_size=self.dp,
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=self.pp,
            enable_expert_parallel=self.expert_parallel,
            **OPTIONS,
            **self.options,
            **options,
        )


FEW_TOPOLOGIES = {
    "dp2-tp2-ep": Topology(2, 2, 1, True, QWEN2),
    "dp2-pp2-mixtral": Topology(2, 1, 2, False, MIXTRAL),
    "dp2-ep-ahead": Topology(2, 1, 1, True, QWEN3, {"async_scheduling": True}),
}
"""Every division, kind of model with experts and way of scheduling once; `test_elastic_engine` has four engine cores.
Without experts, engine cores are engines beside each other: `client/test_data_parallel.py`."""
TOPOLOGIES = amount(
    FEW_TOPOLOGIES,
    thorough={
        **FEW_TOPOLOGIES,
        "dense-dp2": Topology(2, model=TinyModel("Llama", 4, 2)),
        "dp2": Topology(2, model=MIXTRAL),
        "dp2-pp2": Topology(2, 1, 2, False, QWEN3),
        "dp4-ep": Topology(4, 1, 1, True),
    },
)


@dataclass(frozen=True)
class Case:
    """A running engine of several engine cores, transformers' model, and an engine of one."""

    topology: Topology
    oracle: PreTrainedModel
    engine: AsyncLLM
    alone: LLM
    watch: EndsWatch


def model_of(topology: Topology, directory: Path) -> tuple[str, PreTrainedModel]:
    """The model's place, and transformers' model of it."""
    if topology.model is not None:
        return str(directory), topology.model.write(directory)
    import transformers

    place = resolve_model(ModelConfig("random-tiny-moe")).directory
    oracle = transformers.AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager")
    return "random-tiny-moe", oracle.float().eval()
