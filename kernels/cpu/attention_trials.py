"""The trials of attention and of cache writes: see `nbengine.kernels.cpu.trials`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nbengine.kernels import reference
from nbengine.kernels.attention_metadata import AttentionMetadata, build_attention_metadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.attention_functions import AttentionKernels
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.elements import TYPES
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.layout import AttentionShape, Span
from nbengine.kernels.cpu.trials import Trial, is_near, poisoned, random_numbers
from nbengine.kernels.cpu.write_kv import WriteArguments
from nbengine.kernels.kv_cache import cache_shape
from nbengine.kernels.latent import LatentOptions

_LENS = np.array([(1, 150), (7, 37)], np.int32)
"""New tokens and all tokens of a request that decodes, of two chunks, and of one that does not."""
_ERROR, _ERROR_OF_PAIRS = 4e-6, 2**-6
_SPAN = 19
_SOFT_CAP = 5.0


def try_attention(functions: Sequence[Function], decode: AttentionShape, prefill: AttentionShape) -> Trial:
    """Try the functions that attend."""
    dtype, hidden = TYPES[decode.element], TYPES[decode.row_element]
    kernels = CpuKernels(dtype, hidden)
    metadata, slots = _batch(kernels, decode.block_size)
    key, value = (random_numbers(len(slots), 1, decode.head_dim, dtype=hidden, seed=seed) for seed in (1, 2))
    query = random_numbers(metadata.num_tokens, decode.group, decode.head_dim, dtype=hidden, seed=3)
    output = poisoned((metadata.num_tokens, decode.group, decode.value_dim), hidden)
    blocks, parts = int(metadata.block_table.max()) + 1, 1 if decode.rank else 2
    cache = torch.zeros(cache_shape(dtype, blocks, 1, decode.block_size, decode.head_dim, parts), dtype=dtype)
    options = _options_of(decode)
    if decode.rank:
        reference.write_latent(key[:, 0], cache, slots)
    else:
        reference.write_kv(key, value, cache, slots, keys_transposed=True)
    compiled = AttentionKernels(decode, prefill, *functions)
    launches = list(kernels.launches(compiled, query, cache, 1, metadata, options, output))
    yield [(launch.function, launch.arguments) for launch in launches]
    if decode.rank:
        latent = LatentOptions(options.scale, decode.rank)
        expected = reference.latent_attention(query, cache, metadata, latent)
    else:
        expected = reference.paged_attention(query, cache, metadata, options, keys_transposed=True)
    return is_near(output, expected, _ERROR_OF_PAIRS if decode.has_pairs else _ERROR)


def try_write_kv(
    functions: Sequence[Function], head_dim: int, block_size: int, element: Element, row_element: Element
) -> Trial:
    """Try the function that writes keys and values."""
    dtype, hidden = TYPES[element], TYPES[row_element]
    key, value = (random_numbers(5, 2, head_dim, dtype=hidden, seed=seed) for seed in (1, 2))
    written = torch.zeros(cache_shape(dtype, 5, 2, block_size, head_dim), dtype=dtype)
    expected, slots = written.clone(), _slots(block_size)
    yield [(functions[0], _writing(key, value, written, slots))]
    reference.write_kv(key, value, expected, slots, keys_transposed=True)
    return torch.equal(written, expected)


def try_write_latent(
    functions: Sequence[Function], width: int, element: Element, row_element: Element
) -> Trial:
    """Try the function that writes latents."""
    dtype, block_size = TYPES[element], 4
    rows = random_numbers(5, 1, width, dtype=TYPES[row_element], seed=1)
    written = torch.zeros(cache_shape(dtype, 5, 1, block_size, width, parts=1), dtype=dtype)
    expected, slots = written.clone(), _slots(block_size)
    yield [(functions[0], _writing(rows, rows, written, slots))]
    reference.write_latent(rows[:, 0], expected, slots)
    return torch.equal(written, expected)


def _slots(block_size: int) -> Tensor:
    """Return the places of five tokens in five blocks; one of them is not written."""
    return torch.tensor([3 * block_size, -1, 2, 5 * block_size - 1, block_size], dtype=torch.int64)


def _writing(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> ctypes.Structure:
    size = key.element_size()
    return WriteArguments(
        items=1,
        tokens=len(slots),
        kv_heads=key.shape[1],
        key=key.data_ptr(),
        key_stride=key.stride(0) * size,
        value=value.data_ptr(),
        value_stride=value.stride(0) * size,
        slots=slots.data_ptr(),
        key_cache=cache.data_ptr(),
        value_cache=cache.data_ptr() + cache[0].nbytes,
    )


def _options_of(shape: AttentionShape) -> AttentionOptions:
    """Return options that need all the features of a shape."""
    span, has_soft_cap, has_sinks = shape.features
    return AttentionOptions(
        shape.head_dim**-0.5,
        window=_SPAN if span is Span.WINDOW else None,
        chunk=_SPAN if span is Span.CHUNK else None,
        soft_cap=_SOFT_CAP if has_soft_cap else None,
        sinks=random_numbers(shape.group, seed=4) if has_sinks else None,
    )


def _batch(kernels: CpuKernels, block_size: int) -> tuple[AttentionMetadata, Tensor]:
    """Return a step, and the places of all its tokens."""
    query_lens, seq_lens = (np.ascontiguousarray(column) for column in _LENS.T)
    each = -(-int(seq_lens.max()) // block_size)
    table = np.arange(len(_LENS) * each, dtype=np.int32)[::-1].reshape(len(_LENS), each)
    table, place = np.ascontiguousarray(table), torch.device("cpu")
    metadata, whole = (
        build_attention_metadata(lens, seq_lens, table, block_size=block_size, kernels=kernels, device=place)
        for lens in (query_lens, seq_lens)
    )
    return metadata, whole.slot_mapping
