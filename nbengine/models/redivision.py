"""Weights go from worker to worker when the number of engine cores changes, while requests wait for the next
step.

The experts of a layer are divided among all workers of a stage. Each of them is put together, one matrix at a
time, from what its old holders broadcast, and every new holder keeps its part: quantised as it is, or its
values where the new part is no whole number of blocks. New engine cores get from the first one what all have
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from nbengine.distributed.communicator import DataParallelGroup, ParallelState
from nbengine.distributed.layout import RankLayout
from nbengine.kernels.quantized import Format
from nbengine.kernels.quantized_parts import join
from nbengine.models.causal_model import CausalModel
from nbengine.models.configs.moe_config import MoEConfig
from nbengine.models.layers.moe import SparseMoeBlock
from nbengine.models.layers.packed_experts import expert_format
from nbengine.models.layers.weights import WeightSlot
from nbengine.models.sharding import ExpertShard


@dataclass(frozen=True)
class Redivision:
    """A change from `before` engine cores to `after`. The workers of one stage of all of them, new or leaving
    ones too, are in `group`, and call `run` together; `parallel` is what this worker has afterwards.

    Engine cores come and go at the end of the order: number 0 stays, and has all its weights.
    """

    before: int
    after: int
    group: DataParallelGroup
    parallel: ParallelState

    @torch.inference_mode()
    def run(self, model: CausalModel, read: Callable[[dict[str, WeightSlot]], None]) -> None:
        """Exchange the weights, and divide the model's experts again unless its worker leaves.

        `read` fills slots, by name, from the checkpoint. It is called once at most, for matrices that are to be
        quantised, but whose old parts were no whole blocks, and thus dense.
        """
        if self.after > self.before:
            for name, slot in model.weight_slots().items():
                if ".experts." not in name:
                    self._share(slot.tensor)
        from_files: dict[str, WeightSlot] = {}
        for block in model.moe_blocks:
            from_files.update(self._redivide(block))
        if from_files:
            read(from_files)
        if self._stays:
            model.redivided(self.parallel.layout)

    @property
    def _rank(self) -> int:
        return self.parallel.layout.dp_rank

    @property
    def _stays(self) -> bool:
        return self._rank < self.after

    def _share(self, tensor: Tensor) -> None:
        """Give new workers the tensor that all others have; they get it from the first engine core."""
        # Nothing is written where it is already: its pages may be shared with other engines.
        has_it = 0 < self._rank < self.before
        whole = torch.empty_like(tensor) if has_it else tensor.contiguous()
        self.group.broadcast(whole, 0)
        if whole is not tensor and not has_it:
            tensor.copy_(whole)

    def _redivide(self, block: SparseMoeBlock) -> dict[str, WeightSlot]:
        """Exchange a block's experts; return those of the worker's slots that have to be read, by name."""
        held, wanted = _slots(block), {}
        if self._stays:
            wanted = block.redivide(self.parallel) if self._rank < self.before else held
        moving = set(_moving(block.moe, self.parallel.layout, self.before, self.after))
        from_files = {}
        kinds = ("weight", "bias") if block.moe.bias else ("weight",)
        for expert in range(block.moe.num_experts):
            for (projection, dim), kind in product(block.moe.projections, kinds):
                matrix = _Matrix(block, expert, projection, dim, kind)
                form = matrix.form(_at(self.parallel.layout, 0, self.before))
                becomes = matrix.form(_at(self.parallel.layout, 0, self.after))
                if becomes is not None and form is None:
                    if matrix.name in wanted:
                        from_files[block.experts_place.name + matrix.name] = wanted[matrix.name]
                elif expert in moving:
                    whole = self._assemble(matrix, form, held)
                    if matrix.name in wanted:
                        is_filled = wanted[matrix.name].copy_from(whole)
                        assert is_filled
        return from_files

    def _assemble(self, matrix: _Matrix, form: Format | None, held: dict[str, WeightSlot]) -> WeightSlot:
        """Assemble a matrix from the parts that its old holders have, in the format `form`."""
        layout, moe = self.parallel.layout, matrix.block.moe
        inner = ExpertShard.of(moe, _at(layout, 0, self.before)).inner
        shape, place = matrix.part_shape(len(inner)), matrix.block.experts_place
        stored, dtype = shape, matrix.dtype
        if form is not None:
            stored, dtype = form.data_shape(*shape), torch.uint8
        count = moe.intermediate_size // len(inner) if matrix.is_divided else 1
        parts = torch.zeros((count, *stored), dtype=dtype, device=place.device)
        for core in range(self.before):
            shard = ExpertShard.of(moe, _at(layout, core, self.before))
            number = shard.inner.start // len(inner)
            if matrix.expert not in shard.experts or number >= count:
                continue
            part = parts[number]
            if core == self._rank:
                part.copy_(held[matrix.name].tensor)
            self.group.broadcast(part, core)
        tp = self.parallel.tp
        if tp.size > 1:
            # The parts that the ranks of an engine core have got from their counterparts do not overlap, so
            # that their sum has all of them. Every byte is a number that 16-bit types hold.
            parts = tp.all_reduce(parts.to(matrix.dtype)).to(dtype)
        full_shape = matrix.part_shape(moe.intermediate_size)
        if form is None:
            dim = matrix.dim if matrix.kind == "weight" else 0
            return WeightSlot(torch.cat(tuple(parts), dim=dim), full_shape, dim)
        whole = join(form, tuple(parts), shape[0], matrix.dim)
        return WeightSlot(whole, full_shape, matrix.dim, 0, form, full_shape[0])


@dataclass(frozen=True)
class _Matrix:
    """One of the matrices of an expert of a block, whose inner features are along `dim`, or its bias, which the last
    projection has not divided: the worker with the first of the inner features has it."""

    block: SparseMoeBlock
    expert: int
    projection: str
    dim: int
    kind: str = "weight"

    @property
    def name(self) -> str:
        """Return the matrix's name among the slots of the block's experts."""
        return f".{self.expert}.{self.projection}.{self.kind}"

    @property
    def is_divided(self) -> bool:
        """Return whether each worker that has a part of the expert has a part of this."""
        return self.kind == "weight" or self.dim == 0

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the parts that are not quantised."""
        place = self.block.experts_place
        return place.dtype if self.kind == "weight" else place.hidden_dtype

    def form(self, layout: RankLayout) -> Format | None:
        """Return the format of the parts in the division of a worker at `layout`, which is that of all its
        workers."""
        if self.kind == "bias":
            return None
        place, inner = self.block.experts_place, ExpertShard.of(self.block.moe, layout).inner
        return expert_format(place, self.expert, self.projection, self.block.hidden_size, inner)

    def part_shape(self, inner: int) -> tuple[int, ...]:
        """Return the shape of a part with `inner` inner features."""
        hidden_size = self.block.hidden_size
        if self.kind == "bias":
            return (inner if self.is_divided else hidden_size,)
        return (inner, hidden_size) if self.dim == 0 else (hidden_size, inner)


def _slots(block: SparseMoeBlock) -> dict[str, WeightSlot]:
    return dict(block.experts.slots(""))


def _at(layout: RankLayout, core: int, cores: int) -> RankLayout:
    return replace(layout, dp_rank=core, dp_size=cores)


def _moving(moe: MoEConfig, layout: RankLayout, before: int, after: int) -> Iterator[int]:
    """Yield the experts of which some worker of the stage will hold what it has not held."""
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
