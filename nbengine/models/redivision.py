"""Weights go from worker to worker when the number of engine cores changes, while requests wait for the next step.

The experts of a layer are divided among all workers of a stage. Each of them is put together, one matrix at a time, from
what its old holders broadcast, and every new holder keeps its part. What all engine cores have alike, new ones get from
the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nbengine.distributed.communicator import DataParallelGroup, ParallelState
from nbengine.distributed.layout import RankLayout
from nbengine.models.decoder import DecoderForCausalLM
from nbengine.models.layers import WeightSlot
from nbengine.models.moe import PROJECTIONS, SparseMoeBlock
from nbengine.models.moe_config import MoEConfig
from nbengine.models.sharding import ExpertShard


@dataclass(frozen=True)
class Redivision:
    """A change from `before` engine cores to `after`. The workers of one stage of all of them, new or leaving ones too, are
    in `group`, and call `run` together; `parallel` is what this one has afterwards.

    Engine cores come and go at the end of the order: number 0 stays, and has all its weights.
    """

    before: int
    after: int
    group: DataParallelGroup
    parallel: ParallelState

    @torch.inference_mode()
    def run(self, model: DecoderForCausalLM) -> None:
        """Exchange the weights, and divide the model's experts anew unless its worker leaves."""
        if self.after > self.before:
            for name, slot in model.weight_slots().items():
                if ".experts." not in name:
                    self._share(slot.tensor)
        for block in model.moe_blocks:
            self._redivide(block)
        if self._stays:
            model.layout = self.parallel.layout

    @property
    def _rank(self) -> int:
        return self.parallel.layout.dp_rank

    @property
    def _stays(self) -> bool:
        return self._rank < self.after

    def _share(self, tensor: Tensor) -> None:
        """Everybody's tensor becomes that of the first engine core."""
        whole = tensor.contiguous()
        self.group.broadcast(whole, 0)
        if whole is not tensor:
            tensor.copy_(whole)

    def _redivide(self, block: SparseMoeBlock) -> None:
        held, wanted = _slots(block), {}
        if self._stays:
            wanted = block.redivide(self.parallel) if self._rank < self.before else held
        for expert in _moving(block.moe, self.parallel.layout, self.before, self.after):
            for projection, dim in PROJECTIONS:
                name = f".{expert}.{projection}.weight"
                whole = self._assemble(block, expert, dim, held, name)
                if name in wanted:
                    wanted[name].tensor.copy_(whole[wanted[name].index])

    def _assemble(
        self, block: SparseMoeBlock, expert: int, dim: int, held: dict[str, WeightSlot], name: str
    ) -> Tensor:
        """One matrix of an expert, of the parts that its old holders have."""
        part = block.experts.down
        sizes = (block.moe.intermediate_size, part.shape[1])
        whole = part.new_zeros(sizes if dim == 0 else sizes[::-1])
        for core in range(self.before):
            shard = ExpertShard.of(block.moe, _at(self.parallel.layout, core, self.before))
            if expert not in shard.experts:
                continue
            place = whole.narrow(dim, shard.inner.start, len(shard.inner))
            values = held[name].tensor.contiguous() if core == self._rank else place.contiguous()
            self.group.broadcast(values, core)
            place.copy_(values)
        # What the ranks of an engine core have heard of their counterparts does not overlap.
        tp = self.parallel.tp
        return whole if tp.size == 1 else tp.all_reduce(whole)


def _slots(block: SparseMoeBlock) -> dict[str, WeightSlot]:
    return dict(block.experts.slots(""))


def _at(layout: RankLayout, core: int, cores: int) -> RankLayout:
    return replace(layout, dp_rank=core, dp_size=cores)


def _moving(moe: MoEConfig, layout: RankLayout, before: int, after: int) -> Iterator[int]:
    """The experts of which some worker of the stage will hold what it has not held."""
    places = [(core, tp_rank) for core in range(after) for tp_rank in range(layout.tp_size)]
    changes: list[tuple[ExpertShard, ExpertShard | None]] = []
    for core, tp_rank in places:
        worker = replace(layout, tp_rank=tp_rank)
        old = ExpertShard.of(moe, _at(worker, core, before)) if core < before else None
        changes.append((ExpertShard.of(moe, _at(worker, core, after)), old))
    for expert in range(moe.num_experts):
        if any(expert in new.experts and not _holds(old, expert, new.inner) for new, old in changes):
            yield expert


def _holds(shard: ExpertShard | None, expert: int, inner: range) -> bool:
    if shard is None or expert not in shard.experts:
        return False
    return shard.inner.start <= inner.start and inner.stop <= shard.inner.stop
