"""The state of an item of attention on a thread's stack: how it begins, and how it becomes output, at once or by way of
partial results."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from nbengine.kernels.cpu.attention_rule import begin_with_sink
from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.layout import CHUNK, FLOAT, AttentionShape

LOWEST = -1e30
"""The running maximum before the first token."""


@dataclass(frozen=True)
class State:
    """The state of an item on a thread's stack: `[rows]` queries, sums, maxima, totals, and a tile of
    scores."""

    shape: AttentionShape
    base: Int

    def query(self, row: Int) -> Int:
        return self.base + row * self.shape.row_bytes

    def sums(self, row: Int) -> Int:
        return self.query(row) + self.shape.rows * self.shape.row_bytes

    def maximum(self, row: Int) -> Int:
        return self.base + 2 * self.shape.rows * self.shape.row_bytes + row * FLOAT

    def total(self, row: Int) -> Int:
        return self.maximum(row) + self.shape.rows * FLOAT

    def decay(self, tile_row: Int | int) -> Int:
        offset = 2 * self.shape.rows * (self.shape.row_bytes + FLOAT)
        return self.base + offset + tile_row * FLOAT

    def scores(self, tile_row: Int | int) -> Int:
        return self.decay(self.shape.tile) + tile_row * (CHUNK * FLOAT)

    @staticmethod
    def nbytes(shape: AttentionShape) -> int:
        per_tile_row = (CHUNK + 1) * FLOAT
        return 2 * shape.rows * (shape.row_bytes + FLOAT) + shape.tile * per_tile_row


def define_begin(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define begin(state, query, stride, tokens, scale): load scaled queries, padded to whole tiles; clear
    the rest. With sinks there are two more arguments: the part of the task, of which the first one has them, and
    the place of the group's."""

    def body(
        code: Code,
        base: Int,
        query: Int,
        stride: Int,
        tokens: Int,
        scale: Int,
        part: Int | None = None,
        sinks: Int | None = None,
    ) -> None:
        state, factor = State(shape, base), code.load(scale)
        with code.loop(0, tokens) as token, code.loop(0, code.integer(shape.group)) as head:
            source = query + token * stride + head * shape.row_head_bytes
            target = state.query(token * shape.group + head)
            for column, lanes in shape.columns():
                value = code.load(source + column * shape.row_element.size, lanes, shape.row_element)
                code.store(value * factor.splat(lanes), target + column * FLOAT)
        rows = tokens * shape.group
        padded = (rows + (shape.tile - 1)) // shape.tile * shape.tile
        with code.loop(rows, padded) as row:
            for column, lanes in shape.columns():
                code.store(code.constant(0.0, lanes), state.query(row) + column * FLOAT)
        with code.loop(0, padded) as row:
            for column, lanes in shape.columns():
                code.store(code.constant(0.0, lanes), state.sums(row) + column * FLOAT)
            code.store(code.constant(LOWEST), state.maximum(row))
            code.store(code.constant(0.0), state.total(row))
        if part is not None and sinks is not None:
            with code.when(part.compare("==", 0)), code.loop(0, rows) as row:
                sink = sinks + row % shape.group * FLOAT
                begin_with_sink(code, sink, state.maximum(row), state.total(row), LOWEST)

    return define(module, f"{name}_begin", 7 if shape.features.has_sinks else 5, body)


def define_finish(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define finish(state, output, stride, tokens): divide the sums by the totals and write them out."""

    def body(code: Code, base: Int, output: Int, stride: Int, tokens: Int) -> None:
        state = State(shape, base)
        with code.loop(0, tokens) as token, code.loop(0, code.integer(shape.group)) as head:
            row = token * shape.group + head
            inverse = code.constant(1.0) / code.load(state.total(row))
            target = output + token * stride + head * shape.row_head_bytes
            for column, lanes in shape.columns():
                value = code.load(state.sums(row) + column * FLOAT, lanes) * inverse.splat(lanes)
                code.store(value, target + column * shape.row_element.size, shape.row_element)

    return define(module, f"{name}_finish", 4, body)


def define_park(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define park(state, partial, rows): store maxima, totals and sums as a partial result."""

    def body(code: Code, base: Int, partial: Int, rows: Int) -> None:
        state = State(shape, base)
        with code.loop(0, rows) as row:
            record = partial + row * shape.record_bytes
            code.store(code.load(state.maximum(row)), record)
            code.store(code.load(state.total(row)), record + FLOAT)
            for column, lanes in shape.columns():
                value = code.load(state.sums(row) + column * FLOAT, lanes)
                code.store(value, record + (2 + column) * FLOAT)

    return define(module, f"{name}_park", 3, body)


def define_merge(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define merge(state, partials, parts, rows): replace totals and sums by those of the partial results
    together."""

    def body(code: Code, base: Int, partials: Int, parts: Int, rows: Int) -> None:
        state = State(shape, base)
        with code.loop(0, rows) as row:
            record = partials + row * shape.record_bytes
            peak = code.accumulator(code.constant(LOWEST))
            with code.loop(0, parts) as part:
                peak.set(peak.get().at_least(code.load(record + part * shape.partial_bytes)))
            total = code.accumulator(code.constant(0.0))
            sums = {c: code.accumulator(code.constant(0.0, lanes)) for c, lanes in shape.columns()}
            with code.loop(0, parts) as part:
                source = record + part * shape.partial_bytes
                weight = code.exp2(code.load(source) - peak.get())
                total.set(weight.times_plus(code.load(source + FLOAT), total.get()))
                for column, lanes in shape.columns():
                    value = code.load(source + (2 + column) * FLOAT, lanes)
                    sums[column].set(weight.splat(lanes).times_plus(value, sums[column].get()))
            code.store(total.get(), state.total(row))
            for column, cell in sums.items():
                code.store(cell.get(), state.sums(row) + column * FLOAT)

    return define(module, f"{name}_merge", 4, body)
