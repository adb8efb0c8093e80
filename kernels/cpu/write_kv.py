"""The cache write on the CPU: keys are transposed inside their block; both are rounded to the cache's type. Latents
are written as they come, one row a token.

An int8 cache takes each head of a token by itself: its scale is a 127th of the largest number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import reduce

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Element, Int, Vector, define
from nbengine.kernels.cpu.layout import block_bytes, scales_at, vectors_of
from nbengine.kernels.kv_cache import LEAST_LARGEST, LEVELS, SCALE_BYTES

TOKENS_PER_ITEM = 16
MAX_FLOAT16 = 65504.0
"""The largest number of a float16 cache: what is larger is written as this, not as infinity."""


class WriteArguments(ctypes.Structure):
    """The addresses, and the strides in bytes; `slots` holds int64, negative where nothing is to be
    written."""

    _fields_ = [
        ("counter", ctypes.c_int64),
        ("items", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("key", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("key_cache", ctypes.c_int64),
        ("value_cache", ctypes.c_int64),
    ]


def define_write_kv(
    module: ir.Module, head_dim: int, block_size: int, element: Element, row_element: Element
) -> None:
    """Define write_kv(address of `WriteArguments`), to be run by any number of threads at once.

    The cache holds `element`, keys and values come as `row_element`. An item is `TOKENS_PER_ITEM` tokens.
    """
    size = element.size
    stride, scales = block_bytes(element, head_dim, block_size), scales_at(element, head_dim, block_size)

    def write_head(code: Code, source: Int, block: Int, row: Int, step: int) -> None:
        target = block + row * (size if step else head_dim * size)
        if scales is not None:
            levels, scale = _levels(code, source, head_dim, row_element)
            code.store(scale, block + scales + row * SCALE_BYTES)
            for (column, _), level in zip(vectors_of(head_dim), levels, strict=True):
                code.store_lanes(code.narrowed(level, element), target + column * (step or size), step)
            return
        _write_numbers(code, source, target, head_dim, element, row_element, step)

    def body(code: Code, args: Int) -> None:
        def argument(field: str) -> Int:
            return code.load_int(args + getattr(WriteArguments, field).offset)

        kv_heads, tokens = argument("kv_heads"), argument("tokens")
        with code.tickets(args + WriteArguments.counter.offset, argument("items")) as item:
            first = item * TOKENS_PER_ITEM
            with code.loop(first, (first + TOKENS_PER_ITEM).at_most(tokens)) as token:
                slot = code.load_int(argument("slots") + token * 8)
                with code.when(slot.compare(">=", 0)), code.loop(0, kv_heads) as head:
                    block = (slot // block_size * kv_heads + head) * stride
                    row, at = slot % block_size, head * (head_dim * row_element.size)
                    key = argument("key") + token * argument("key_stride") + at
                    write_head(code, key, argument("key_cache") + block, row, block_size * size)
                    value = argument("value") + token * argument("value_stride") + at
                    write_head(code, value, argument("value_cache") + block, row, 0)

    define(module, "write_kv", 1, body, exported=True)


def define_write_latent(module: ir.Module, width: int, element: Element, row_element: Element) -> None:
    """Define write_latent(address of `WriteArguments`), to be run by any number of threads at once: `key` are rows of
    `width` numbers, and there is nothing else. An item is `TOKENS_PER_ITEM` tokens."""

    def body(code: Code, args: Int) -> None:
        def argument(field: str) -> Int:
            return code.load_int(args + getattr(WriteArguments, field).offset)

        tokens = argument("tokens")
        with code.tickets(args + WriteArguments.counter.offset, argument("items")) as item:
            first = item * TOKENS_PER_ITEM
            with code.loop(first, (first + TOKENS_PER_ITEM).at_most(tokens)) as token:
                slot = code.load_int(argument("slots") + token * 8)
                with code.when(slot.compare(">=", 0)):
                    source = argument("key") + token * argument("key_stride")
                    target = argument("key_cache") + slot * (width * element.size)
                    _write_numbers(code, source, target, width, element, row_element)

    define(module, "write_latent", 1, body, exported=True)


def _write_numbers(
    code: Code, source: Int, target: Int, count: int, element: Element, row_element: Element, step: int = 0
) -> None:
    """Round numbers to the cache's type; with `step`, to places that many bytes apart."""
    for column, lanes in vectors_of(count):
        place = source + column * row_element.size
        if element is row_element:
            bits = code.load_bits(place, lanes, element)
        else:
            value = code.load(place, lanes, row_element)
            if element is Element.FLOAT16:
                value = code.at_most_in_size(value, MAX_FLOAT16)
            bits = code.narrowed(value, element)
        code.store_lanes(bits, target + column * (step or element.size), step)


def _levels(code: Code, source: Int, head_dim: int, row_element: Element) -> tuple[list[Vector], Vector]:
    """Divide a head by its scale; return the quotients, from -127 to 127, and the scale, which is NaN if one of the
    numbers is NaN or infinite."""
    numbers = [
        code.load(source + column * row_element.size, lanes, row_element)
        for column, lanes in vectors_of(head_dim)
    ]
    zeros = [code.constant(0.0, number.lanes) for number in numbers]
    sizes = (number.at_least(zero - number) for number, zero in zip(numbers, zeros, strict=True))
    largest = _fold(sizes, Vector.at_least).at_least(code.constant(LEAST_LARGEST))
    # Comparisons pass NaN over; 0 times NaN or infinity is NaN, and 0 times anything else adds nothing.
    blemish = _fold((n * zero for n, zero in zip(numbers, zeros, strict=True)), Vector.__add__)
    most = code.constant(LEVELS)
    inverse, scale = most / largest, largest / most + blemish
    return [number * inverse.splat(number.lanes) for number in numbers], scale


def _fold(vectors: Iterable[Vector], combine: Callable[[Vector, Vector], Vector]) -> Vector:
    """Combine all lanes of vectors into one number."""
    by_lanes: dict[int, Vector] = {}
    for vector in vectors:
        before = by_lanes.get(vector.lanes)
        by_lanes[vector.lanes] = vector if before is None else combine(before, vector)
    return reduce(combine, (vector.reduce(combine) for vector in by_lanes.values()))
