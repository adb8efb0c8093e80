"""The attention of a prepared step: the shapes and functions of its blocks, and the plans that the layers of one rule and
cache group share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.attention_functions import AttentionFunctions
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.cpu.decode_plan import DecodePlanArguments
from nbengine.kernels.cpu.layout import AttentionArguments, Features, Span
from nbengine.kernels.cpu.plan import prefill_work
from nbengine.kernels.cpu.program import Program, places_of
from nbengine.models.layers.attention import Attention
from nbengine.models.layers.decoder_attention import DecoderAttention
from nbengine.models.layers.latent_attention import LatentAttention
from nbengine.models.prepared.buffers import AttentionSizes
from nbengine.models.prepared.latent import attention_of
from nbengine.models.prepared.model import PreparedModel
from nbengine.models.prepared.operations import LayerAttention, StepOperations

AttentionBlock = DecoderAttention | LatentAttention
"""The blocks of attention that prepared steps know."""

_ATTEND_AT = places_of(AttentionArguments)


class AttentionGroup:
    """The layers of one rule and one cache group, by their numbers among those with attention on this stage; `number`
    is that of the group itself, `cache_group` that of the cache group."""

    def __init__(
        self,
        number: int,
        options: AttentionOptions,
        cache_group: int,
        layers: list[int],
        kv_heads: int,
        functions: AttentionFunctions,
    ) -> None:
        self.number = number
        self.cache_group = cache_group
        self.kv_heads = kv_heads
        self.functions = functions
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

    def plan_prefill(self, attn: AttentionMetadata, program: Program) -> None:
        """Plan for requests of several tokens, and make room for partial results."""
        shape, kv_heads = self.functions.prefill_shape, self.kv_heads
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


def shape_of(block: AttentionBlock) -> Attention:
    """Return the attention that a block's functions compute."""
    return attention_of(block) if isinstance(block, LatentAttention) else block.attention


def functions_of(block: AttentionBlock, kernels: CpuKernels, kv_cache: Tensor) -> AttentionFunctions:
    """Return the functions for a block and its cache."""
    if isinstance(block, LatentAttention):
        return kernels.latent_functions(block.num_heads, kv_cache, block.options)
    own = block.attention
    return kernels.functions(own.num_heads, own.head_dim, kv_cache, own.options)


def groups_of(
    model: PreparedModel, kernels: CpuKernels, kv_caches: Sequence[Any]
) -> tuple[list[AttentionGroup], list[LayerAttention]]:
    """Divide layers into groups by the rule of their attention and their cache group; return the groups, and the
    attention of each layer."""
    groups: dict[tuple[int | None, int | None, int], AttentionGroup] = {}
    attends: list[LayerAttention] = []
    for layer, cache_group, kv_cache in zip(model.layers, model.layer_groups, kv_caches, strict=True):
        block = layer.mixer
        if not isinstance(block, AttentionBlock):
            continue
        shape, rotary = shape_of(block), block.rotary
        options, functions = shape.options, functions_of(block, kernels, kv_cache)
        turn = "rotate_pairs" if model.config.rotary_interleaved else "rotate"
        group = groups.setdefault(
            (options.window, options.chunk, cache_group),
            AttentionGroup(len(groups), options, cache_group, [], shape.num_kv_heads, functions),
        )
        group.layers.append(len(attends))
        attends.append(
            LayerAttention(
                heads=shape.num_heads,
                kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                functions=functions,
                options=options,
                group=group.number,
                angles=None if rotary is None else rotary.table,
                turn=turn,
                factors=_factors_of(block, model),
            )
        )
    return list(groups.values()), attends


def _factors_of(block: AttentionBlock, model: PreparedModel) -> Tensor | None:
    """Return the factors of a block's queries by positions, if they have any."""
    if isinstance(block, LatentAttention) or block.growth is None or model.query_factors is None:
        return None
    return model.query_factors.table


def attentions_of(model: PreparedModel) -> list[AttentionBlock]:
    """Return the attention blocks of a stage."""
    blocks = (layer.mixer for layer in model.layers)
    return [block for block in blocks if isinstance(block, AttentionBlock)]


def query_parts_of(block: AttentionBlock) -> int:
    """Return how many times the features of a key a query has, with the gate beside it."""
    return 2 if isinstance(block, DecoderAttention) and block.is_gated else 1


def sizes_of(blocks: Iterable[AttentionBlock]) -> AttentionSizes:
    """Return the most numbers that one of some blocks makes of a token."""
    return AttentionSizes(*map(max, zip(*(astuple(_sizes_of(block)) for block in blocks), strict=True)))


def _sizes_of(block: AttentionBlock) -> AttentionSizes:
    attention = shape_of(block)
    if isinstance(block, LatentAttention):
        attended = block.num_heads * block.latent.value_dim
        return AttentionSizes(0, 0, 0, attended, attention.num_kv_heads)
    size, parts = attention.head_dim, query_parts_of(block)
    heads, kv_heads = attention.num_heads * size, attention.num_kv_heads * size
    return AttentionSizes(
        qkv=parts * heads + 2 * kv_heads,
        queries=0 if parts == 1 else heads + kv_heads,
        rotated=heads + kv_heads,
        attended=heads,
        kv_heads=attention.num_kv_heads,
    )
