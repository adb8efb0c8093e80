"""The short causal convolution on the CPU: each channel of a request over its last tokens.

A tile of channels goes through a request's tokens with the last inputs in registers. A state has a channel's inputs
side by side, tokens have channels side by side: vectors of channels are picked out of the state's.
"""

from __future__ import annotations

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Accumulator, Code, Int, Vector, define
from nbengine.kernels.cpu.layout import vectors_of
from nbengine.kernels.cpu.recurrent_layout import ConvolutionShape, Item, Panel, RecurrentArguments, Work
from nbengine.kernels.cpu.vectors import gated


def define_short_convolution(module: ir.Module, name: str, shape: ConvolutionShape) -> None:
    """Define `name`(address of `RecurrentArguments`), to be run by any number of threads at once."""
    whole = shape.channels // shape.tile * shape.tile
    rest = shape.channels - whole
    tile = _define_tile(module, shape, "tile", vectors_of(shape.tile)) if whole else None
    last_tile = _define_tile(module, shape, "last_tile", vectors_of(rest)) if rest else None

    def body(code: Code, args: Int) -> None:
        def get(name: str) -> Int:
            return code.load_int(args + getattr(RecurrentArguments, name).offset)

        parts = get("parts")
        with code.tickets(args + RecurrentArguments.counter.offset, get("items")) as ticket:
            part, row = ticket % parts, get("work") + ticket // parts * (len(Work) * 4)
            if tile is not None:
                first = part * shape.span
                with code.loop(first, (first + shape.span).at_most(whole), shape.tile) as channel:
                    code.call(tile, args, row, channel)
            if last_tile is not None:
                with code.when((part + 1).compare("==", parts)):
                    code.call(last_tile, args, row, code.integer(whole))

    define(module, name, 1, body, exported=True)


def _define_tile(module: ir.Module, shape: ConvolutionShape, name: str, vectors: Panel) -> ir.Function:
    """Define tile(args, row, channel): convolve the channels from `channel` on of one request."""
    element, size = shape.element, shape.element.size
    past = shape.kernel - 1

    def body(code: Code, args: Int, row: Int, channel: Int) -> None:
        item = Item(code, args, row)

        def state(slot: Int) -> Int:
            return item.get("states") + slot * shape.slot_bytes + channel * (past * size)

        weights = [
            _columns(code, item.get("weight") + channel * (shape.kernel * size), shape, shape.kernel, v)
            for v in vectors
        ]
        windows = [[code.accumulator(code.constant(0.0, lanes)) for _ in range(past)] for _, lanes in vectors]
        with code.when(item.goes_on):
            source = state(item.work(Work.SOURCE))
            for vector, window in zip(vectors, windows, strict=True):
                for cell, numbers in zip(window, _columns(code, source, shape, past, vector), strict=True):
                    cell.set(numbers)
        with item.segments() as (first, last, slot):
            with code.loop(first, last) as number:
                token = item.work(Work.FIRST_TOKEN) + number
                x = item.get("x") + token * item.get("x_stride") + channel * size
                output = item.get("output") + token * (shape.channels * size) + channel * size
                for (offset, lanes), factors, window in zip(vectors, weights, windows, strict=True):
                    own = code.load(x + offset * size, lanes, element)
                    bias = code.constant(0.0, lanes)
                    if shape.has_bias:
                        bias = code.load(item.get("bias") + (channel + offset) * size, lanes, element)
                    result = _convolve(factors, [*(cell.get() for cell in window), own], bias)
                    if shape.silu:
                        result = gated(code, result, code.constant(1.0, lanes))
                    code.store(result, output + offset * size, element)
                    _shift(window, own)
            target = state(slot)
            for (offset, _), window in zip(vectors, windows, strict=True):
                for place, cell in enumerate(window):
                    bits = code.narrowed(cell.get(), element)
                    code.store_lanes(bits, target + (offset * past + place) * size, step=past * size)

    return define(module, name, 3, body)


def _columns(
    code: Code, address: Int, shape: ConvolutionShape, count: int, vector: tuple[int, int]
) -> list[Vector]:
    """Load vectors of channels, one for each of the `count` numbers that every channel has there."""
    offset, lanes = vector
    numbers = code.load(address + offset * (count * shape.element.size), lanes * count, shape.element)
    return [numbers.every(count, place) for place in range(count)]


def _convolve(factors: list[Vector], numbers: list[Vector], total: Vector) -> Vector:
    for factor, number in zip(factors, numbers, strict=True):
        total = factor.times_plus(number, total)
    return total


def _shift(window: list[Accumulator], own: Vector) -> None:
    following = [*(cell.get() for cell in window[1:]), own]
    for cell, number in zip(window, following, strict=True):
        cell.set(number)
