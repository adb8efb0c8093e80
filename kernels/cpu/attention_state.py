"""The state of an item of attention on a thread's stack: how it begins, how states are joined, and how it becomes
output, at once or by way of partial results.

A state is a maximum, the total of the weights relative to it, and the sums of the weighted values. Joining one that has
seen nothing, whose maximum is `LOWEST`, changes no bit of another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Accumulator, Code, Int, Vector, define
from nbengine.kernels.cpu.layout import CHUNK, FLOAT, PREFILL_PART, AttentionShape

LOWEST = -1e30
"""The maximum before the first token."""


@dataclass(frozen=True)
class Joined:
    """The maximum of two states together, and the factors of the first one's and the second one's sums."""

    peak: Vector
    shrink: Vector
    growth: Vector


def joined_to(code: Code, before: Vector, more: Vector) -> Joined:
    """Join a maximum to the one before it."""
    peak = more.at_least(before)
    return Joined(peak, code.exp2(before - peak), code.exp2(more - peak))


def joined_sum(shrink: Vector, before: Vector, growth: Vector, more: Vector) -> Vector:
    """Return shrink * before + growth * more, rounded in the one way in which all sums are joined."""
    return shrink.times_plus(before, growth * more)


@dataclass(frozen=True)
class State:
    """The state of an item on a thread's stack: a chunk's keys and values in pairs, `[rows]` queries, sums, maxima,
    totals, and a tile of scores."""

    shape: AttentionShape
    base: Int

    def keys(self, token: Int) -> Int:
        return self.base + token * self.shape.head_bytes

    def values(self, token: Int) -> Int:
        return self.base + self.shape.packed_bytes + token * self.shape.head_bytes

    def query(self, row: Int | int) -> Int:
        return self.base + 2 * self.shape.packed_bytes + row * self.shape.row_bytes

    def sums(self, row: Int | int) -> Int:
        return self.query(self.shape.rows) + row * self.shape.sum_bytes

    def maximum(self, row: Int | int) -> Int:
        return self.sums(self.shape.rows) + row * FLOAT

    def total(self, row: Int | int) -> Int:
        return self.maximum(row) + self.shape.rows * FLOAT

    def decay(self, tile_row: Int | int) -> Int:
        return self.total(self.shape.rows) + tile_row * FLOAT

    def growth(self, tile_row: Int | int) -> Int:
        return self.decay(self.shape.tile) + tile_row * FLOAT

    def scores(self, tile_row: Int | int) -> Int:
        return self.growth(self.shape.tile) + tile_row * (CHUNK * FLOAT)

    @staticmethod
    def nbytes(shape: AttentionShape) -> int:
        per_tile_row = (CHUNK + 2) * FLOAT
        rows = shape.rows * (shape.row_bytes + shape.sum_bytes + 2 * FLOAT)
        return 2 * shape.packed_bytes + rows + shape.tile * per_tile_row


def define_begin(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define begin(state, query, stride, tokens, scale): load scaled queries, padded to whole tiles; clear
    the rest."""

    def body(code: Code, base: Int, query: Int, stride: Int, tokens: Int, scale: Int) -> None:
        state, factor = State(shape, base), code.load(scale)
        with code.loop(0, tokens) as token, code.loop(0, code.integer(shape.group)) as head:
            source = query + token * stride + head * shape.row_head_bytes
            target = state.query(token * shape.group + head)
            for column, lanes in shape.columns():
                value = code.load(source + column * shape.row_element.size, lanes, shape.row_element)
                code.store(value * factor.splat(lanes), target + column * shape.factor.size, shape.factor)
        rows = tokens * shape.group
        padded = (rows + (shape.tile - 1)) // shape.tile * shape.tile
        with code.loop(rows, padded) as row:
            for column, lanes in shape.columns():
                code.store(
                    code.constant(0.0, lanes), state.query(row) + column * shape.factor.size, shape.factor
                )
        with code.loop(0, padded) as row:
            for column, lanes in shape.value_columns():
                code.store(code.constant(0.0, lanes), state.sums(row) + column * FLOAT)
            code.store(code.constant(LOWEST), state.maximum(row))
            code.store(code.constant(0.0), state.total(row))

    return define(module, f"{name}_begin", 5, body)


def define_finish(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define finish(state, output, stride, tokens): divide the sums by the totals and write them out. With sinks there is
    one more argument, the place of the group's: a sink is joined last, as a token that has no value, so that no cut of
    the cache changes where it comes in."""

    def body(code: Code, base: Int, output: Int, stride: Int, tokens: Int, sinks: Int | None = None) -> None:
        state = State(shape, base)
        with code.loop(0, tokens) as token, code.loop(0, code.integer(shape.group)) as head:
            row = token * shape.group + head
            factor, total = code.constant(1.0), code.load(state.total(row))
            if sinks is not None:
                score = code.load(sinks + head * FLOAT) * code.constant(math.log2(math.e))
                joined = joined_to(code, code.load(state.maximum(row)), score)
                factor = joined.shrink
                total = joined_sum(factor, total, joined.growth, code.constant(1.0))
            inverse = factor / total
            target = output + token * stride + head * shape.output_head_bytes
            for column, lanes in shape.value_columns():
                value = code.load(state.sums(row) + column * FLOAT, lanes) * inverse.splat(lanes)
                code.store(value, target + column * shape.row_element.size, shape.row_element)

    return define(module, f"{name}_finish", 5 if shape.features.has_sinks else 4, body)


def define_park(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define park(state, partial, rows): store maxima, totals and sums as a partial result."""

    def body(code: Code, base: Int, partial: Int, rows: Int) -> None:
        state = State(shape, base)
        with code.loop(0, rows) as row:
            record = partial + row * shape.record_bytes
            code.store(code.load(state.maximum(row)), record)
            code.store(code.load(state.total(row)), record + FLOAT)
            for column, lanes in shape.value_columns():
                value = code.load(state.sums(row) + column * FLOAT, lanes)
                code.store(value, record + (2 + column) * FLOAT)

    return define(module, f"{name}_park", 3, body)


def define_join(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define join(state, partials, first, parts, rows): replace maxima, totals and sums by those of the partial results
    together. The first of them is number `first` of the cache's parts.

    The parts of each `PREFILL_PART` are joined first, as an item of prefill does that has all of it.
    """
    together = PREFILL_PART // shape.part

    def body(code: Code, base: Int, partials: Int, first: Int, parts: Int, rows: Int) -> None:
        state, last = State(shape, base), first + parts
        with code.loop(0, rows) as row:
            record, whole = partials + row * shape.record_bytes, _Row.empty(code, shape)
            with code.loop(first // together, (last + (together - 1)) // together) as coarse:
                these = _Row.empty(code, shape)
                begin, end = (coarse * together).at_least(first), (coarse * together + together).at_most(last)
                with code.loop(begin, end) as part:
                    source = record + (part - first) * shape.partial_bytes
                    these.join(code, code.load(source), code.load(source + FLOAT), source + 2 * FLOAT)
                whole.join(code, these.maximum.get(), these.total.get(), these.sums)
            code.store(whole.maximum.get(), state.maximum(row))
            code.store(whole.total.get(), state.total(row))
            for column, cell in whole.sums.items():
                code.store(cell.get(), state.sums(row) + column * FLOAT)

    return define(module, f"{name}_join", 5, body)


@dataclass(frozen=True)
class _Row:
    """The state of one row in registers; the sums by their first columns."""

    shape: AttentionShape
    maximum: Accumulator
    total: Accumulator
    sums: dict[int, Accumulator]

    @classmethod
    def empty(cls, code: Code, shape: AttentionShape) -> _Row:
        """Make the state that has seen nothing."""
        columns = shape.value_columns()
        sums = {column: code.accumulator(code.constant(0.0, lanes)) for column, lanes in columns}
        return cls(shape, code.accumulator(code.constant(LOWEST)), code.accumulator(code.constant(0.0)), sums)

    def join(self, code: Code, maximum: Vector, total: Vector, sums: Int | dict[int, Accumulator]) -> None:
        """Join a state whose sums are at an address or in registers."""
        joined = joined_to(code, self.maximum.get(), maximum)
        self.maximum.set(joined.peak)
        self.total.set(joined_sum(joined.shrink, self.total.get(), joined.growth, total))
        for column, lanes in self.shape.value_columns():
            more = code.load(sums + column * FLOAT, lanes) if isinstance(sums, Int) else sums[column].get()
            cell = self.sums[column]
            cell.set(joined_sum(joined.shrink.splat(lanes), cell.get(), joined.growth.splat(lanes), more))
