"""The selective state space of Mamba-2 on the CPU, for prompts and decodes alike.

It is the exact recurrence, token by token, in one pass over the state for each token. A token's result does not depend
on where its prompt is cut into steps: every column is summed over the rows in one order, in `CHAINS` sums at a time,
whose additions do not wait for each other.

A token's record (`nbengine.kernels.cpu.matrix_state`) has b and c in float32, the decay, dt and the skip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import gcd

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, Vector, define
from nbengine.kernels.cpu.layout import FLOAT, vectors_of
from nbengine.kernels.cpu.matrix_state import AHEAD, Recurrence, Token, define_recurrence, width_of
from nbengine.kernels.cpu.recurrent_layout import Item, MatrixShape, Panel

CHAINS = 4
"""The sums that a column has, if they divide its rows."""

_LOG2_E = math.log2(math.e)
_LINE = 64

Address = Callable[[Int, int], Int]
"""A function from a row and a column to the place of their number."""


def define_state_space(module: ir.Module, name: str, shape: MatrixShape) -> None:
    """Define `name`(address of `RecurrentArguments`), to be run by any number of threads at once."""
    rule = Recurrence(_Record.nbytes(shape), _define_prepare, _define_step, _define_pass)
    define_recurrence(module, name, shape, rule)


@dataclass(frozen=True)
class _Record:
    """A token's record: its numbers by name."""

    shape: MatrixShape
    base: Int

    @property
    def b(self) -> Int:
        return self.base

    @property
    def c(self) -> Int:
        return self.base + self.shape.key_dim * FLOAT

    @property
    def decay(self) -> Int:
        return self.base + 2 * self.shape.key_dim * FLOAT

    @property
    def dt(self) -> Int:
        return self.decay + FLOAT

    @property
    def skip(self) -> Int:
        return self.decay + 2 * FLOAT

    @staticmethod
    def nbytes(shape: MatrixShape) -> int:
        return -(-(2 * shape.key_dim + 3) * FLOAT // 64) * 64


def _define_prepare(module: ir.Module, shape: MatrixShape) -> ir.Function:
    """Define prepare(records, args, row, head, start, end): write the records of some tokens of a request."""
    element = shape.element

    def body(code: Code, records: Int, args: Int, row: Int, head: Int, start: Int, end: Int) -> None:
        item = Item(code, args, row)
        place = Token(shape, item, head)
        rate = code.load(item.get("rate") + head * FLOAT) * code.constant(_LOG2_E)
        skip = code.load(item.get("skip") + head * FLOAT)
        with code.loop(start, end) as token:
            record = _Record(shape, records + (token - start) * _Record.nbytes(shape))
            b, c = place.key_head("key", token), place.key_head("query", token)
            for column, lanes in vectors_of(shape.key_dim):
                code.store(code.load(b + column * element.size, lanes, element), record.b + column * FLOAT)
                code.store(code.load(c + column * element.size, lanes, element), record.c + column * FLOAT)
            dt = code.load(place.gate("dt", token))
            code.store(code.exp2(dt * rate), record.decay)
            code.store(dt, record.dt)
            code.store(skip, record.skip)

    return define(module, "prepare", 6, body)


def _define_step(module: ir.Module, shape: MatrixShape, from_zeros: bool) -> ir.Function:
    """Define step(source, target, record, value, output): do one token with a whole state."""
    row_bytes = shape.value_dim * FLOAT

    def body(code: Code, source: Int, target: Int, base: Int, value: Int, output: Int) -> None:
        for panel in shape.wide_panels:
            first, width = panel[0][0] * FLOAT, width_of(panel) * FLOAT

            def place(row: Int, column: int) -> Int:
                return source + row * row_bytes + column * FLOAT

            def load(row: Int, first: int = first, width: int = width) -> None:
                for column in range(first, first + width, _LINE):
                    code.prefetch(source + row * row_bytes + column + AHEAD)

            _do_token(
                code,
                _Record(shape, base),
                panel,
                None if from_zeros else place,
                lambda row, column: target + row * row_bytes + column * FLOAT,
                value,
                output,
                None if from_zeros else load,
            )

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
        def place(row: Int, column: int) -> Int:
            return matrix + row * row_bytes + column * FLOAT

        with code.loop(0, tokens) as token:
            record = _Record(shape, records + token * _Record.nbytes(shape))
            places = value + token * value_stride, output + token * output_stride
            _do_token(code, record, panel, place, place, *places)

    return define(module, f"pass_{width_of(panel)}", 7, body)


def _do_token(
    code: Code,
    record: _Record,
    panel: Panel,
    source: Address | None,
    target: Address,
    value: Int,
    output: Int,
    before_row: Callable[[Int], None] | None = None,
) -> None:
    """Emit what a token does to a panel of the state at `source` (None: zeros), which goes to `target`, and its output
    for these columns."""
    shape, element = record.shape, record.shape.element
    decay, dt, skip = (code.load(place) for place in (record.decay, record.dt, record.skip))
    inputs = [code.load(value + column * element.size, lanes, element) for column, lanes in panel]
    added = [x * dt.splat(x.lanes) for x in inputs]
    chains = gcd(shape.key_dim, CHAINS)
    sums = [[code.accumulator(code.constant(0.0, lanes)) for _, lanes in panel] for _ in range(chains)]
    with code.loop(0, code.integer(shape.key_dim), chains) as first:
        for number, chain in enumerate(sums):
            row = first + number
            b, c = code.load(record.b + row * FLOAT), code.load(record.c + row * FLOAT)
            if before_row is not None:
                before_row(row)
            for (column, lanes), change, total in zip(panel, added, chain, strict=True):
                before = (
                    code.constant(0.0, lanes) if source is None else code.load(source(row, column), lanes)
                )
                after = change.times_plus(b.splat(lanes), decay.splat(lanes) * before)
                code.store(after, target(row, column))
                total.set(c.splat(lanes).times_plus(after, total.get()))
    for (column, lanes), x, *totals in zip(panel, inputs, *sums, strict=True):
        seen = reduce(Vector.__add__, (total.get() for total in totals))
        code.store(skip.splat(lanes).times_plus(x, seen), output + column * element.size, element)
