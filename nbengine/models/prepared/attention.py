"""The plans of attention that the layers of one rule and cache group share in a prepared step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.decode_plan import DecodePlanArguments
from nbengine.kernels.cpu.layout import AttentionArguments, AttentionShape, Features, Span
from nbengine.kernels.cpu.plan import prefill_work
from nbengine.kernels.cpu.program import Program, places_of
from nbengine.models.prepared.operations import StepOperations

_ATTEND_AT = places_of(AttentionArguments)


class AttentionGroup:
    """The layers of one rule and one cache group, by their numbers among those with attention on this stage; `number`
    is that of the group itself, `cache_group` that of the cache group."""

    def __init__(self, number: int, options: AttentionOptions, cache_group: int, layers: list[int]) -> None:
        self.number = number
        self.cache_group = cache_group
        self.layers = layers
        self._options = options
        self._prefills: list[int] = []
        self._addresses: NDArray[np.int64] = np.empty(0, np.int64)
        self._work: NDArray[np.int32] = np.empty((0, 0), np.int32)
        self._partials: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._arrivals: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def span(self) -> Span | None:
        """Return the kind of rule."""
        return Features.of(self._options).span

    def set_up(self, program: Program, operations: StepOperations, place: int) -> None:
        """Tell the operation at `place`, which plans for requests of one token, those that attend."""
        self._prefills = [operations.prefills[layer] for layer in self.layers]
        self._addresses = program.addresses[[operations.decodes[layer] for layer in self.layers]]
        self._plan = program.view(place, DecodePlanArguments)
        self._plan.attends, self._plan.layers = self._addresses.ctypes.data, len(self._addresses)

    def take_in(self, attn: AttentionMetadata, ids: int, positions: Tensor) -> None:
        """Take in a step's batch; `ids` is the address of the token ids, or 0."""
        plan, table = self._plan, attn.block_table
        plan.ids = ids
        plan.positions = positions.data_ptr()
        plan.slots = attn.slot_mapping.data_ptr()
        plan.seq_lens = attn.seq_lens.data_ptr()
        plan.decodes = attn.num_decodes
        plan.block_table = table.data_ptr()
        plan.block_table_stride = table.stride(0) * table.element_size()

    def plan_prefill(
        self, attn: AttentionMetadata, program: Program, shape: AttentionShape, kv_heads: int
    ) -> None:
        """Plan for requests of several tokens, and make room for partial results."""
        work = prefill_work(attn, shape.max_tokens, self._options)
        self._work = work.rows
        partial_bytes = work.partials * kv_heads * shape.partial_bytes
        if partial_bytes > len(self._partials):
            self._partials = np.empty(partial_bytes, np.uint8)
        if work.tasks * kv_heads > len(self._arrivals):
            self._arrivals = np.zeros(work.tasks * kv_heads, np.int64)
        table = attn.block_table
        for name, value in (
            ("items", len(self._work) * kv_heads),
            ("work", self._work.ctypes.data),
            ("partials", self._partials.ctypes.data),
            ("arrivals", self._arrivals.ctypes.data),
            ("block_table", table.data_ptr()),
            ("block_table_stride", table.stride(0) * table.element_size()),
        ):
            program.arguments[self._prefills, _ATTEND_AT[name]] = value
