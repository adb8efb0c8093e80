"""The gated delta rule on the CPU, for prompts and decodes alike.

It is the exact recurrence, token by token. The columns of a state do not depend on each other, so a panel of them
stays in the first cache while tokens pass over it, and the pass that makes a token's change also sums what the next
token reads. That takes about as many multiply-adds as solving for a chunk of tokens together, and a token's result
does not depend on where its prompt is cut into steps: every column is summed over the rows in ascending order.

A token's record (`nbengine.kernels.cpu.matrix_state`) has its key and query, normalised, their product, the decay and
beta.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Accumulator, Code, Int, Vector, define
from nbengine.kernels.cpu.layout import FLOAT, vectors_of
from nbengine.kernels.cpu.matrix_state import AHEAD, Recurrence, Token, define_recurrence, rows_of, width_of
from nbengine.kernels.cpu.recurrent_layout import Item, MatrixShape, Panel
from nbengine.kernels.cpu.vectors import l2_factor
from nbengine.kernels.recurrent_reference import L2_EPS

_LOG2_E = math.log2(math.e)
_LINE = 64


def define_delta_rule(module: ir.Module, name: str, shape: MatrixShape) -> None:
    """Define `name`(address of `RecurrentArguments`), to be run by any number of threads at once."""
    rule = Recurrence(_Record.nbytes(shape), _define_prepare, _define_step, _define_pass)
    define_recurrence(module, name, shape, rule)


@dataclass(frozen=True)
class _Record:
    """A token's record: its numbers by name."""

    shape: MatrixShape
    base: Int

    @property
    def key(self) -> Int:
        return self.base

    @property
    def query(self) -> Int:
        return self.base + self.shape.key_dim * FLOAT

    @property
    def product(self) -> Int:
        return self.base + 2 * self.shape.key_dim * FLOAT

    @property
    def decay(self) -> Int:
        return self.product + FLOAT

    @property
    def beta(self) -> Int:
        return self.product + 2 * FLOAT

    @staticmethod
    def nbytes(shape: MatrixShape) -> int:
        return -(-(2 * shape.key_dim + 3) * FLOAT // 64) * 64


def _define_prepare(module: ir.Module, shape: MatrixShape) -> ir.Function:
    """Define prepare(records, args, row, head, start, end): write the records of some tokens of a request."""

    def body(code: Code, records: Int, args: Int, row: Int, head: Int, start: Int, end: Int) -> None:
        item = Item(code, args, row)
        place = Token(shape, item, head)
        with code.loop(start, end) as token:
            record = _Record(shape, records + (token - start) * _Record.nbytes(shape))
            key = _normalised(code, shape, place.key_head("key", token), 1.0)
            query = _normalised(code, shape, place.key_head("query", token), shape.key_dim**-0.5)
            for (column, _), key_part, query_part in zip(vectors_of(shape.key_dim), key, query, strict=True):
                code.store(key_part, record.key + column * FLOAT)
                code.store(query_part, record.query + column * FLOAT)
            code.store(_sum(a * b for a, b in zip(key, query, strict=True)), record.product)
            exponent = code.load(place.gate("decay", token)) * code.constant(_LOG2_E)
            code.store(code.exp2(exponent), record.decay)
            code.store(code.load(place.gate("beta", token)), record.beta)

    return define(module, "prepare", 6, body)


def _normalised(code: Code, shape: MatrixShape, address: Int, scale: float) -> list[Vector]:
    numbers = [
        code.load(address + column * shape.element.size, lanes, shape.element)
        for column, lanes in vectors_of(shape.key_dim)
    ]
    factor = l2_factor(code, _sum(x * x for x in numbers), L2_EPS) * code.constant(scale)
    return [x * factor.splat(x.lanes) for x in numbers]


def _sum(vectors: Iterable[Vector]) -> Vector:
    """Add all lanes of vectors."""
    by_lanes: dict[int, Vector] = {}
    for vector in vectors:
        before = by_lanes.get(vector.lanes)
        by_lanes[vector.lanes] = vector if before is None else before + vector
    return reduce(Vector.__add__, (vector.reduce(Vector.__add__) for vector in by_lanes.values()))


class _Sums:
    """The sums over the rows of a panel that a token reads: with its key, and with its query."""

    def __init__(self, code: Code, panel: Panel) -> None:
        self._code = code
        self._cells: list[tuple[Accumulator, Accumulator]] = [
            (code.accumulator(code.constant(0.0, lanes)), code.accumulator(code.constant(0.0, lanes)))
            for _, lanes in panel
        ]

    def clear(self) -> None:
        """Begin again."""
        for cell in (cell for pair in self._cells for cell in pair):
            cell.set(self._code.constant(0.0, cell.get().lanes))

    def add(self, row: Sequence[Vector], key: Vector, query: Vector) -> None:
        """Add a row of the panel, times the key's and the query's number."""
        for numbers, (known, seen) in zip(row, self._cells, strict=True):
            known.set(key.splat(numbers.lanes).times_plus(numbers, known.get()))
            seen.set(query.splat(numbers.lanes).times_plus(numbers, seen.get()))

    def finish(
        self, shape: MatrixShape, panel: Panel, record: _Record, value: Int, output: Int
    ) -> list[Vector]:
        """Write a token's output for these columns; return what its key changes in the state, for each."""
        code, element, changes = self._code, shape.element, []
        decay, beta, product = (code.load(x) for x in (record.decay, record.beta, record.product))
        for (column, lanes), (known, seen) in zip(panel, self._cells, strict=True):
            wanted = code.load(value + column * element.size, lanes, element)
            left = decay.splat(lanes)
            change = (wanted - left * known.get()) * beta.splat(lanes)
            result = product.splat(lanes).times_plus(change, left * seen.get())
            code.store(result, output + column * element.size, element)
            changes.append(change)
        return changes


def _define_step(module: ir.Module, shape: MatrixShape, from_zeros: bool) -> ir.Function:
    """Define step(source, target, record, value, output): do one token with a whole state."""
    row_bytes = shape.value_dim * FLOAT

    def body(code: Code, source: Int, target: Int, base: Int, value: Int, output: Int) -> None:
        record = _Record(shape, base)
        for panel in shape.wide_panels:
            sums = _Sums(code, panel)
            if not from_zeros:
                for row in rows_of(code, shape):
                    numbers = [code.load(source + row * row_bytes + c * FLOAT, lanes) for c, lanes in panel]
                    for column in range(panel[0][0] * FLOAT, (panel[0][0] + width_of(panel)) * FLOAT, _LINE):
                        code.prefetch(source + row * row_bytes + column + AHEAD)
                    sums.add(numbers, *_factors(code, record, row))
            changes = sums.finish(shape, panel, record, value, output)
            decay = code.load(record.decay)
            for row in rows_of(code, shape):
                key = code.load(record.key + row * FLOAT)
                for (column, lanes), change in zip(panel, changes, strict=True):
                    before = code.constant(0.0, lanes)
                    if not from_zeros:
                        before = code.load(source + row * row_bytes + column * FLOAT, lanes)
                    after = change.times_plus(key.splat(lanes), decay.splat(lanes) * before)
                    code.store(after, target + row * row_bytes + column * FLOAT)

    return define(module, "first_step" if from_zeros else "step", 5, body)


def _define_pass(module: ir.Module, shape: MatrixShape, columns: Panel) -> ir.Function:
    """Define pass(panel, records, value, value_stride, output, output_stride, tokens): do some tokens with a panel,
    whose rows lie one after the other."""
    panel = [(column - columns[0][0], lanes) for column, lanes in columns]
    row_bytes = width_of(panel) * FLOAT

    def body(
        code: Code,
        matrix: Int,
        records: Int,
        value: Int,
        value_stride: Int,
        output: Int,
        output_stride: Int,
        tokens: Int,
    ) -> None:
        def load(row: Int) -> list[Vector]:
            return [code.load(matrix + row * row_bytes + c * FLOAT, lanes) for c, lanes in panel]

        sums = _Sums(code, panel)
        for row in rows_of(code, shape):
            sums.add(load(row), *_factors(code, _Record(shape, records), row))
        with code.loop(0, tokens) as token:
            record = _Record(shape, records + token * _Record.nbytes(shape))
            following = _Record(shape, records + (token + 1).at_most(tokens - 1) * _Record.nbytes(shape))
            places = value + token * value_stride, output + token * output_stride
            changes = sums.finish(shape, panel, record, *places)
            decay = code.load(record.decay)
            sums.clear()
            for row in rows_of(code, shape):
                key, after = code.load(record.key + row * FLOAT), []
                for (column, lanes), change, before in zip(panel, changes, load(row), strict=True):
                    after.append(change.times_plus(key.splat(lanes), decay.splat(lanes) * before))
                    code.store(after[-1], matrix + row * row_bytes + column * FLOAT)
                sums.add(after, *_factors(code, following, row))

    return define(module, f"pass_{width_of(panel)}", 7, body)


def _factors(code: Code, record: _Record, row: Int) -> tuple[Vector, Vector]:
    return code.load(record.key + row * FLOAT), code.load(record.query + row * FLOAT)
