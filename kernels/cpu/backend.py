"""Attention and cache write on the CPU, compiled for this processor and for the model's shape: over keys and values,
and over latents."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.attention_functions import (
    AttentionFunctions,
    AttentionKernels,
    compile_attention,
    compile_write_kv,
    compile_write_latent,
    latent_group,
)
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.layout import (
    PLAIN,
    AttentionArguments,
    Features,
)
from nbengine.kernels.cpu.plan import WorkList, decode_work, prefill_work
from nbengine.kernels.cpu.threads import select_runner
from nbengine.kernels.cpu.write_kv import (
    TOKENS_PER_ITEM,
    WriteArguments,
)
from nbengine.kernels.kv_cache import head_width
from nbengine.kernels.latent import LatentOptions

_CACHE_ELEMENTS = {**ELEMENTS, torch.int8: Element.INT8}

_ITEMS_FOR_THREADS = 4  # fewer items of a cache write are not worth waking the other threads
LOG2_E = math.log2(math.e)
"""The factor of scores, whose powers are those of 2."""


@dataclass(frozen=True)
class Launch:
    """A launch of one kernel over one work list, set up but for what differs from layer to layer."""

    function: Function
    arguments: AttentionArguments
    address: int
    threads: int
    keep_alive: tuple[object, ...]


_Plan: TypeAlias = tuple[Launch, ...]
_Rule: TypeAlias = tuple[AttentionKernels, int | None, int | None]
"""The key of a plan: the functions, and the sizes of window and chunks."""


class _Plans(dict[_Rule, _Plan]):
    """The plans of one batch, for the layers of each rule."""


def sinks_for(options: AttentionOptions, num_heads: int) -> torch.Tensor | None:
    """Return a layer's sinks as the functions read them, float32 and contiguous; the same memory if they are so.

    Raises:
        InvalidArgumentError: there is not one for each head.
    """
    if options.sinks is None:
        return None
    if options.sinks.shape[0] != num_heads:
        raise InvalidArgumentError("sinks", tuple(options.sinks.shape), f"[{num_heads}], one for each head")
    return options.sinks.float().contiguous()


def set_options(arguments: AttentionArguments, options: AttentionOptions, sinks: torch.Tensor | None) -> None:
    """Write into a function's arguments what it reads of a layer's options; `sinks` are those of `sinks_for`."""
    if options.soft_cap is None:
        arguments.scale = options.scale * LOG2_E
    else:
        arguments.scale = options.scale / options.soft_cap
        arguments.soft_cap = options.soft_cap * LOG2_E
    arguments.span = options.span or 0
    arguments.sinks = 0 if sinks is None else sinks.data_ptr()


class CpuKernels:
    """Kernels for a float32, bfloat16, float16 or int8 cache on the CPU; arithmetic and sums are float32.

    Queries, keys, values and results are of `hidden_dtype`, by default that of the cache (float32 if it is int8).

    An instance is used by one thread at a time, the one that calls torch; several instances, each in its
    thread, do not disturb each other.
    """

    name = "cpu"
    keys_transposed = True

    def __init__(self, dtype: torch.dtype, hidden_dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._hidden_dtype = hidden_dtype or (torch.float32 if dtype is torch.int8 else dtype)
        self._elements = _CACHE_ELEMENTS[dtype], ELEMENTS[self._hidden_dtype]
        self._run = select_runner()
        self._write = WriteArguments()
        self._attention: dict[tuple[int, int, int, Features, int], AttentionKernels] = {}
        self._partials: NDArray[np.float32] = np.empty(0, np.float32)
        self._arrivals: NDArray[np.int64] = np.zeros(0, np.int64)

    def warm_up(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        options: AttentionOptions | None = None,
    ) -> None:
        """Compile for a shape, which takes some tenths of a second, once a process; otherwise the first use
        does."""
        features = PLAIN if options is None else Features.of(options)
        self._compiled(head_dim, num_heads // num_kv_heads, block_size, features)
        compile_write_kv(head_dim, block_size, *self._elements)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See `nbengine.kernels.dispatch.Kernels.write_kv`."""
        head_dim = key.shape[2]
        kv_heads, block_size = self._check_cache(kv_cache, head_dim)
        key, value = self._rows(key, "key"), self._rows(value, "value")
        arguments = self._write
        arguments.kv_heads = kv_heads
        arguments.value = value.data_ptr()
        arguments.value_stride = value.stride(0) * self._hidden_dtype.itemsize
        arguments.value_cache = kv_cache.data_ptr() + kv_cache.stride(0) * self._dtype.itemsize
        function = compile_write_kv(head_dim, block_size, *self._elements)
        self._write_rows(function, key, kv_cache, slot_mapping)

    def _write_rows(
        self, function: Function, rows: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write keys, or latents, with what else the arguments have."""
        if slot_mapping.dtype is not torch.int64 or not slot_mapping.is_contiguous():
            raise InvalidArgumentError("slot_mapping.dtype", slot_mapping.dtype, "int64, contiguous")
        tokens, arguments = slot_mapping.shape[0], self._write
        items = -(-tokens // TOKENS_PER_ITEM)
        arguments.counter = 0
        arguments.items = items
        arguments.tokens = tokens
        arguments.key = rows.data_ptr()
        arguments.key_stride = rows.stride(0) * self._hidden_dtype.itemsize
        arguments.slots = slot_mapping.data_ptr()
        arguments.key_cache = kv_cache.data_ptr()
        threads = torch.get_num_threads() if items >= _ITEMS_FOR_THREADS else 1
        self._run(function, ctypes.addressof(arguments), threads)

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `nbengine.kernels.dispatch.Kernels.paged_attention`."""
        head_dim = query.shape[2]
        kv_heads, block_size = self._check_cache(kv_cache, head_dim)
        query = self._rows(query, "query")
        group = query.shape[1] // kv_heads
        compiled = self._compiled(head_dim, group, block_size, Features.of(options))
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attend(self.launches(compiled, query, kv_cache, kv_heads, metadata, options, output))
        return output

    def _attend(self, launches: Iterable[Launch]) -> None:
        for launch in launches:
            self._run(launch.function, launch.address, launch.threads)

    def launches(
        self,
        compiled: AttentionKernels,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        kv_heads: int,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        output: torch.Tensor,
    ) -> Iterator[Launch]:
        """Yield what is to run for attention, with the plans of a rule, which are made for the first layer that asks."""
        plans = metadata.plan
        if not isinstance(plans, _Plans):
            plans = metadata.plan = _Plans()
        plan = plans.get((compiled, options.window, options.chunk))
        if plan is None:
            plan = plans[compiled, options.window, options.chunk] = self._plan(
                metadata, compiled, kv_heads, options
            )
        sinks = None if options.sinks is None else sinks_for(options, query.shape[1])
        # A cache of latents has one part, whose rows are keys and values.
        values = 0 if compiled.decode_shape.rank else kv_cache.stride(0) * self._dtype.itemsize
        for launch in plan:
            arguments = launch.arguments
            arguments.counter = 0
            arguments.query = query.data_ptr()
            arguments.query_stride = query.stride(0) * self._hidden_dtype.itemsize
            arguments.output = output.data_ptr()
            arguments.key_cache = kv_cache.data_ptr()
            arguments.value_cache = kv_cache.data_ptr() + values
            if compiled.decode_shape.features is PLAIN:
                arguments.scale = options.scale * LOG2_E
            else:
                set_options(arguments, options, sinks)
            yield launch

    def warm_up_latent(self, num_heads: int, width: int, block_size: int, options: LatentOptions) -> None:
        """See `nbengine.kernels.latent.LatentKernels.warm_up_latent`."""
        self._compiled(width, latent_group(num_heads), block_size, PLAIN, options.rank)
        compile_write_latent(width, *self._elements)

    def write_latent(self, rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """See `nbengine.kernels.latent.LatentKernels.write_latent`."""
        width = rows.shape[1]
        self._check_cache(cache, width)
        if rows.dtype is not self._hidden_dtype:
            raise InvalidArgumentError("rows.dtype", rows.dtype, f"the model's, {self._hidden_dtype}")
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        self._write_rows(compile_write_latent(width, *self._elements), rows, cache, slot_mapping)

    def latent_attention(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: LatentOptions,
    ) -> torch.Tensor:
        """See `nbengine.kernels.latent.LatentKernels.latent_attention`."""
        count, heads, width = query.shape
        _, block_size = self._check_cache(cache, width)
        query, group = self._rows(query, "query"), latent_group(heads)
        compiled = self._compiled(width, group, block_size, PLAIN, options.rank)
        output = query.new_empty(count, heads, options.rank)
        plain = AttentionOptions(options.scale)
        self._attend(self.launches(compiled, query, cache, heads // group, metadata, plain, output))
        return output

    def functions(
        self, num_heads: int, head_dim: int, kv_cache: torch.Tensor, options: AttentionOptions
    ) -> AttentionFunctions:
        """Return the functions for layers with `num_heads` query heads and these options, and a layer's cache."""
        kv_heads, block_size = self._check_cache(kv_cache, head_dim)
        features, group = Features.of(options), num_heads // kv_heads
        compiled = self._compiled(head_dim, group, block_size, features)
        write = compile_write_kv(head_dim, block_size, *self._elements)
        return AttentionFunctions(
            write, compiled.decode, compiled.prefill, compiled.decode_shape, compiled.prefill_shape
        )

    def latent_functions(
        self, num_heads: int, cache: torch.Tensor, options: LatentOptions
    ) -> AttentionFunctions:
        """Return the functions for layers with `num_heads` query heads and these options, and a layer's cache of
        latents. Groups of `latent_group` query heads take the place of those that share a KV head."""
        width = cache.shape[4]
        _, block_size = self._check_cache(cache, width)
        compiled = self._compiled(width, latent_group(num_heads), block_size, PLAIN, options.rank)
        write = compile_write_latent(width, *self._elements)
        return AttentionFunctions(
            write, compiled.decode, compiled.prefill, compiled.decode_shape, compiled.prefill_shape
        )

    def _compiled(
        self, head_dim: int, group: int, block_size: int, features: Features, rank: int = 0
    ) -> AttentionKernels:
        """Return what `compile_attention` gives for these kernels' types."""
        shape = head_dim, group, block_size, features, rank
        compiled = self._attention.get(shape)
        if compiled is None:
            kinds = head_dim, group, block_size, *self._elements, features, rank
            compiled = self._attention[shape] = compile_attention(*kinds)
        return compiled

    def _rows(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if tensor.dtype is not self._hidden_dtype:
            raise InvalidArgumentError(f"{name}.dtype", tensor.dtype, f"the model's, {self._hidden_dtype}")
        _, heads, channels = tensor.stride()
        return tensor if channels == 1 and heads == tensor.shape[2] else tensor.contiguous()

    def _check_cache(self, kv_cache: torch.Tensor, head_dim: int) -> tuple[int, int]:
        """Return the KV heads and the block size of a cache."""
        width = head_width(self._dtype, head_dim)
        if kv_cache.dtype is not self._dtype or not kv_cache.is_contiguous() or kv_cache.shape[4] != width:
            found = (kv_cache.dtype, tuple(kv_cache.shape), kv_cache.stride())
            raise InvalidArgumentError(
                "kv_cache", found, f"contiguous, of type {self._dtype}, with {width} elements a head"
            )
        return kv_cache.shape[2], kv_cache.shape[3]

    def _plan(
        self,
        metadata: AttentionMetadata,
        compiled: AttentionKernels,
        kv_heads: int,
        options: AttentionOptions,
    ) -> _Plan:
        table = metadata.block_table
        if table.dtype is not torch.int32 or table.stride(1) != 1:
            raise InvalidArgumentError("block_table.dtype", table.dtype, "int32, each row contiguous")
        parts = []
        if metadata.num_decodes:
            parts.append((compiled.decode_shape, compiled.decode, decode_work(metadata, options)))
        if metadata.num_decodes < metadata.num_reqs:
            work = prefill_work(metadata, compiled.prefill_shape.max_tokens, options)
            parts.append((compiled.prefill_shape, compiled.prefill, work))
        floats = max(work.partials * shape.partial_bytes for shape, _, work in parts) * kv_heads // 4
        tasks = max(work.tasks for _, _, work in parts) * kv_heads
        if floats > len(self._partials):
            self._partials = np.empty(floats, np.float32)
        if tasks > len(self._arrivals):
            self._arrivals = np.zeros(tasks, np.int64)
        return tuple(self._launch(metadata, function, work, kv_heads) for _, function, work in parts)

    def _launch(
        self, metadata: AttentionMetadata, function: Function, work: WorkList, kv_heads: int
    ) -> Launch:
        items = len(work.rows) * kv_heads
        arguments = AttentionArguments(
            items=items,
            kv_heads=kv_heads,
            block_table=metadata.block_table.data_ptr(),
            block_table_stride=metadata.block_table.stride(0) * 4,
            work=work.rows.ctypes.data,
            partials=self._partials.ctypes.data,
            arrivals=self._arrivals.ctypes.data,
        )
        threads = torch.get_num_threads() if items > 1 else 1
        keep_alive = (work.rows, metadata.block_table, self._partials, self._arrivals)
        return Launch(function, arguments, ctypes.addressof(arguments), threads, keep_alive)
