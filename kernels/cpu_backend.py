"""Attention and cache write on the CPU, compiled for this processor and for the model's shape."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numpy.typing import NDArray

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu_ir import Element
from nbengine.kernels.cpu_jit import Function, compile_module, host_processor
from nbengine.kernels.cpu_layout import AttentionArguments, AttentionShape
from nbengine.kernels.cpu_plan import WorkList, decode_work, prefill_work
from nbengine.kernels.cpu_threads import select_runner
from nbengine.kernels.paged_attention_cpu import define_attention
from nbengine.kernels.write_kv_cpu import TOKENS_PER_ITEM, WriteArguments, define_write_kv
from nbengine.worker.attention_metadata import AttentionMetadata

ELEMENTS = {
    torch.float32: Element.FLOAT32,
    torch.bfloat16: Element.BFLOAT16,
    torch.float16: Element.FLOAT16,
}

_PREFILL_ROWS = 48
_PREFILL_TILE = 6
_MAX_DECODE_TILE = 8
_ITEMS_FOR_THREADS = 4  # fewer items of a cache write are not worth waking the other threads
_LOG2_E = math.log2(math.e)


def supports(dtype: torch.dtype) -> bool:
    """Whether there are kernels for `dtype` on this processor."""
    return dtype in ELEMENTS and (dtype != torch.float16 or host_processor().converts_float16)


@dataclass(frozen=True)
class _AttentionKernels:
    decode_shape: AttentionShape
    prefill_shape: AttentionShape
    decode: Function
    prefill: Function


@cache
def _compile_attention(head_dim: int, group: int, block_size: int, element: Element) -> _AttentionKernels:
    budget = host_processor().accumulators
    tiles = range(1, min(_MAX_DECODE_TILE, budget) + 1)
    decode_tile = min(tiles, key=lambda tile: (-(-group // tile) * tile, -tile))
    decode = AttentionShape(head_dim, group, block_size, element, decode_tile, 1, budget)
    prefill_tokens = max(1, _PREFILL_ROWS // group)
    prefill = AttentionShape(head_dim, group, block_size, element, _PREFILL_TILE, prefill_tokens, budget)
    module = ir.Module("nbengine_attention")
    define_attention(module, "decode", decode)
    define_attention(module, "prefill", prefill)
    return _AttentionKernels(decode, prefill, *compile_module(module, "decode", "prefill"))


@cache
def _compile_write_kv(head_dim: int, block_size: int, item_size: int) -> Function:
    module = ir.Module("nbengine_write_kv")
    define_write_kv(module, "write_kv", head_dim, block_size, item_size)
    (function,) = compile_module(module, "write_kv")
    return function


@dataclass(frozen=True)
class _Launch:
    """One kernel over one work list, set up but for what differs from layer to layer."""

    function: Function
    arguments: AttentionArguments
    address: int
    threads: int
    keep_alive: tuple[object, ...]


@dataclass(frozen=True)
class _Plan:
    compiled: _AttentionKernels
    launches: tuple[_Launch, ...]


class CpuKernels:
    """Kernels for a float32, bfloat16 or float16 model on the CPU; arithmetic and sums are float32.

    An instance is used by one thread at a time, the one that calls torch; several instances, each in its
    thread, do not disturb each other.
    """

    name = "cpu"
    keys_transposed = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._element = ELEMENTS[dtype]
        self._run = select_runner()
        self._write = WriteArguments()
        self._partials: NDArray[np.float32] = np.empty(0, np.float32)
        self._arrivals: NDArray[np.int64] = np.zeros(0, np.int64)

    def warm_up(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        """Compile for a shape, which takes some tenths of a second, once a process; else the first use does."""
        _compile_attention(head_dim, num_heads // num_kv_heads, block_size, self._element)
        _compile_write_kv(head_dim, block_size, self._element.size)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See `nbengine.kernels.dispatch.Kernels.write_kv`."""
        _, _, kv_heads, block_size, head_dim = kv_cache.shape
        key, value = self._rows(key, "key"), self._rows(value, "value")
        self._check_cache(kv_cache)
        if slot_mapping.dtype is not torch.int64 or not slot_mapping.is_contiguous():
            raise InvalidArgumentError("slot_mapping.dtype", slot_mapping.dtype, "int64, contiguous")
        size, tokens = self._element.size, slot_mapping.shape[0]
        items = -(-tokens // TOKENS_PER_ITEM)
        arguments = self._write
        arguments.counter = 0
        arguments.items = items
        arguments.tokens = tokens
        arguments.kv_heads = kv_heads
        arguments.key = key.data_ptr()
        arguments.key_stride = key.stride(0) * size
        arguments.value = value.data_ptr()
        arguments.value_stride = value.stride(0) * size
        arguments.slots = slot_mapping.data_ptr()
        arguments.key_cache = kv_cache.data_ptr()
        arguments.value_cache = kv_cache.data_ptr() + kv_cache.stride(0) * size
        threads = torch.get_num_threads() if items >= _ITEMS_FOR_THREADS else 1
        function = _compile_write_kv(head_dim, block_size, size)
        self._run(function, ctypes.addressof(arguments), threads)

    def paged_attention(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        """See `nbengine.kernels.dispatch.Kernels.paged_attention`."""
        _, _, kv_heads, block_size, head_dim = kv_cache.shape
        query = self._rows(query, "query")
        self._check_cache(kv_cache)
        compiled = _compile_attention(head_dim, query.shape[1] // kv_heads, block_size, self._element)
        plan = metadata.plan
        if not isinstance(plan, _Plan) or plan.compiled is not compiled:
            plan = metadata.plan = self._plan(metadata, compiled, kv_heads)
        size = self._element.size
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for launch in plan.launches:
            arguments = launch.arguments
            arguments.counter = 0
            arguments.query = query.data_ptr()
            arguments.query_stride = query.stride(0) * size
            arguments.output = output.data_ptr()
            arguments.key_cache = kv_cache.data_ptr()
            arguments.value_cache = kv_cache.data_ptr() + kv_cache.stride(0) * size
            arguments.scale = scale * _LOG2_E
            self._run(launch.function, launch.address, launch.threads)
        return output

    def _rows(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if tensor.dtype is not self._dtype:
            raise InvalidArgumentError(f"{name}.dtype", tensor.dtype, f"the model's, {self._dtype}")
        _, heads, channels = tensor.stride()
        return tensor if channels == 1 and heads == tensor.shape[2] else tensor.contiguous()

    def _check_cache(self, kv_cache: torch.Tensor) -> None:
        if kv_cache.dtype is not self._dtype or not kv_cache.is_contiguous():
            found = (kv_cache.dtype, kv_cache.stride())
            raise InvalidArgumentError("kv_cache", found, f"contiguous, of type {self._dtype}")

    def _plan(self, metadata: AttentionMetadata, compiled: _AttentionKernels, kv_heads: int) -> _Plan:
        table = metadata.block_table
        if table.dtype is not torch.int32 or table.stride(1) != 1:
            raise InvalidArgumentError("block_table.dtype", table.dtype, "int32, each row contiguous")
        parts = []
        if metadata.num_decodes:
            parts.append((compiled.decode_shape, compiled.decode, decode_work(metadata)))
        if metadata.num_decodes < metadata.num_reqs:
            work = prefill_work(metadata, compiled.prefill_shape.max_tokens)
            parts.append((compiled.prefill_shape, compiled.prefill, work))
        floats = max(work.partials * shape.partial_bytes for shape, _, work in parts) * kv_heads // 4
        tasks = max(work.tasks for _, _, work in parts) * kv_heads
        if floats > len(self._partials):
            self._partials = np.empty(floats, np.float32)
        if tasks > len(self._arrivals):
            self._arrivals = np.zeros(tasks, np.int64)
        launches = (self._launch(metadata, function, work, kv_heads) for _, function, work in parts)
        return _Plan(compiled, tuple(launches))

    def _launch(
        self, metadata: AttentionMetadata, function: Function, work: WorkList, kv_heads: int
    ) -> _Launch:
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
        return _Launch(function, arguments, ctypes.addressof(arguments), threads, keep_alive)
