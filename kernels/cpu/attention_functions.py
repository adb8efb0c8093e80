"""The functions of attention and of cache writes on the CPU, each compiled once for a model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Element
from nbengine.kernels.cpu.jit import Function, Processor
from nbengine.kernels.cpu.layout import (
    DECODE_PART,
    MAX_TILE,
    PLAIN,
    PREFILL_PART,
    AttentionShape,
    Features,
)
from nbengine.kernels.cpu.paged_attention import define_attention
from nbengine.kernels.cpu.pairs import multiplies_pairs
from nbengine.kernels.cpu.trials import compile_tried
from nbengine.kernels.cpu.write_kv import define_write_kv, define_write_latent

_PREFILL_ROWS = 48
_PREFILL_TILE = 6


@dataclass(frozen=True, eq=False)
class AttentionKernels:
    """The functions that attend, for requests of one token and for others, and their shapes."""

    decode_shape: AttentionShape
    prefill_shape: AttentionShape
    decode: Function
    prefill: Function


@cache
def compile_attention(
    head_dim: int,
    group: int,
    block_size: int,
    element: Element,
    row_element: Element,
    features: Features = PLAIN,
    rank: int = 0,
) -> AttentionKernels:
    """Compile attention for `group` query heads of `head_dim` numbers to a KV head, and a cache of `element`; queries
    and results are of `row_element`. With a `rank` the cache is one of latents.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.attention_trials import try_attention

    def choose(processor: Processor) -> tuple[AttentionShape, AttentionShape]:
        budget = processor.accumulators
        tiles = range(1, min(MAX_TILE, budget) + 1)
        tile = min(tiles, key=lambda tile: (-(-group // tile) * tile, -tile))
        tokens = max(1, _PREFILL_ROWS // group)
        kinds = (head_dim, group, block_size, element, row_element)
        can_pair = attends_in_pairs(processor, head_dim, block_size)
        has_pairs = element is Element.BFLOAT16 and not rank and can_pair
        more = budget, features, rank, has_pairs
        return (
            AttentionShape(*kinds, tile, 1, DECODE_PART, *more),
            AttentionShape(*kinds, _PREFILL_TILE, tokens, PREFILL_PART, *more),
        )

    functions, shapes = compile_tried(_define_attention, ["decode", "prefill"], choose, try_attention)
    return AttentionKernels(*shapes, *functions)


def attends_in_pairs(processor: Processor, head_dim: int, block_size: int) -> bool:
    """Return whether attention to a cache of bfloat16 multiplies pairs."""
    return head_dim % MAX_LANES == block_size % MAX_LANES == 0 and multiplies_pairs(processor)


def _define_attention(module: ir.Module, decode: AttentionShape, prefill: AttentionShape) -> None:
    define_attention(module, "decode", decode)
    define_attention(module, "prefill", prefill)


@cache
def compile_write_kv(head_dim: int, block_size: int, element: Element, row_element: Element) -> Function:
    """Compile the function of `WriteArguments` that writes keys and values.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.attention_trials import try_write_kv

    arguments = head_dim, block_size, element, row_element
    (function,), _ = compile_tried(define_write_kv, ["write_kv"], lambda _: arguments, try_write_kv)
    return function


@cache
def compile_write_latent(width: int, element: Element, row_element: Element) -> Function:
    """Compile the function of `WriteArguments` that writes latents of `width` numbers.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.attention_trials import try_write_latent

    arguments = width, element, row_element
    (function,), _ = compile_tried(
        define_write_latent, ["write_latent"], lambda _: arguments, try_write_latent
    )
    return function


def latent_group(num_heads: int) -> int:
    """Return how many query heads an item of attention over latents computes, which all read the same rows: few, so
    that a request has items for several threads."""
    return max(size for size in range(1, _PREFILL_TILE + 1) if num_heads % size == 0)


@dataclass(frozen=True)
class AttentionFunctions:
    """The function of `WriteArguments` that writes keys and values, and those of `AttentionArguments` that attend:
    `decode` for requests of one token, `prefill` for others."""

    write: Function
    decode: Function
    prefill: Function
    decode_shape: AttentionShape
    prefill_shape: AttentionShape
