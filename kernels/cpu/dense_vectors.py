"""Products with dense weights in vectors, for processors without tiles: a lane sums every 16th number or pair.

Some rows of the weight are multiplied with some rows of x at a time. The sums of an outcome are the same whichever
rows these are: along the columns in each lane, and then over the lanes in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Accumulator, CacheLevel, Code, Int, Vector
from nbengine.kernels.cpu.dense_parts import ROW_GROUP, DenseKind, Frame, Instructions
from nbengine.kernels.cpu.pairs import add_products
from nbengine.kernels.cpu.shuffles import fold

_AHEAD = 4096
"""Bytes from what is read of the weight to what is brought to the cache meanwhile."""


class Prefetch(Enum):
    """The rows of the weight that a product of a block's rows brings to the cache for the next products."""

    NOTHING = "nothing"
    ALL = "all"
    """All that is as far ahead as what is multiplied: the first of a few products does that."""
    ROW = "a row"
    """One of the next rows: of many products each does that until all are there, so that memory is read while numbers
    are multiplied instead of before."""


@dataclass(frozen=True)
class Block:
    """The numbers of rows that are multiplied at a time: of the weight, and of x, largest first. With a single row of
    x, rows of the weight are read one after the other if `is_serial`, else together, too."""

    outputs: int
    rows: tuple[int, ...]
    is_serial: bool

    @classmethod
    def of(cls, accumulators: int) -> Block:
        """Return the block for which registers suffice.

        With few of them a vector of 16 numbers has two, whose sums do not wait for each other: one row of the weight
        is then read as fast as memory gives it, and several together more slowly.
        """
        return cls(4, (4, 1), is_serial=False) if accumulators >= 16 else cls(2, (3, 2, 1), is_serial=True)


def multiply_vectors(kind: DenseKind, block: Block, code: Code, args: Int) -> None:
    """Emit the function of `DenseArguments`."""
    frame = Frame.of_calls(code, args, kind)
    frame.lay_out_rows(lambda number: _lay_out(frame, number))
    out_features, columns = frame.get("out_features"), frame.get("columns")
    tail = columns % kind.instructions.columns
    last = (out_features - block.outputs).at_least(code.integer(0))
    tails = code.stack(block.outputs * kind.block_bytes)
    position = code.stack(8)
    for group, start, stop in frame.products():
        first = (group * block.outputs).at_most(last)
        # Where there are fewer rows than a block has, the last one takes the others' places.
        places = [(first + number).at_most(out_features - 1) for number in range(block.outputs)]
        weights = [frame.get("weight") + place * frame.get("weight_stride") for place in places]
        with code.when(tail.compare(">", 0)):
            for number, weight in enumerate(weights):
                source = weight + (columns - tail) * kind.weight.size
                frame.copy_row(source, tails + number * kind.block_bytes, tail, kind.weight)
        valid = (out_features - first).at_most(block.outputs)
        for count, row, prefetch in _rows(code, block, position, start, stop):
            next_row = (first + block.outputs + (row - start) // count).at_most(out_features - 1)
            following = frame.get("weight") + next_row * frame.get("weight_stride")
            it = _Product(frame, weights, tails, row, count, prefetch, following)
            if count == 1 and block.is_serial:
                found = [each for output in range(block.outputs) for each in it.sums(output, output + 1)]
            else:
                found = it.sums(0, block.outputs)
            for number in range(count):
                own = found[number * block.outputs : (number + 1) * block.outputs]
                frame.write(fold(code, [each.get() for each in own]), row + number, first, valid)


def _rows(
    code: Code, block: Block, position: Int, start: Int, stop: Int
) -> Iterator[tuple[int, Int, Prefetch]]:
    """Go over rows of x, some at a time; yield how many, the first one, and what is brought to the cache meanwhile.
    `position` is a place on the stack."""
    b = code.builder
    code.store_int(start, position)
    for index, count in enumerate(block.rows):
        spread = count * block.outputs
        for prefetch in [Prefetch.ROW] * (index == 0) + [Prefetch.ALL, Prefetch.NOTHING]:

            def fits(count: int = count, prefetch: Prefetch = prefetch, spread: int = spread) -> ir.Value:
                row = code.load_int(position)
                found = (stop - row).compare(">=", count)
                match prefetch:
                    case Prefetch.ROW:
                        are_many = (stop - start).compare(">=", spread)
                        return b.and_(b.and_(found, are_many), (row - start).compare("<", spread))
                    case Prefetch.ALL:
                        return b.and_(found, row.compare("==", start))
                    case _:
                        return found

            with code.loop_while(fits):
                row = code.load_int(position)
                yield count, row, prefetch
                code.store_int(row + count, position)


@dataclass(frozen=True)
class _Product:
    """The product of some rows of the weight with `count` rows of x, from `row` on, which brings more of the weight to
    the cache; `following` is the address of the row that `Prefetch.ROW` brings."""

    frame: Frame
    weights: list[Int]
    tails: Int
    row: Int
    count: int
    prefetch: Prefetch
    following: Int

    def sums(self, begin: int, end: int) -> list[Accumulator]:
        """Multiply; return the sums of each row of x with each of the weight's from `begin` to `end`, in 16 lanes."""
        frame, code, kind = self.frame, self.frame.code, self.frame.kind
        columns, step = frame.get("columns"), kind.instructions.columns
        blocks = (columns + (step - 1)) // step
        stride = blocks * kind.block_bytes
        x = [frame.get("packed") + (self.row + number) * stride for number in range(self.count)]
        found = [code.accumulator(code.constant(0.0, MAX_LANES)) for _ in range(self.count * (end - begin))]
        with code.loop(0, columns // step) as number:
            here = number * (step * kind.weight.size)
            factors = []
            if self.prefetch is Prefetch.ROW:
                code.prefetch(self.following + here, CacheLevel.FIRST)
            for weight in self.weights[begin:end]:
                if self.prefetch is Prefetch.ALL:
                    code.prefetch(weight + here + _AHEAD, CacheLevel.FIRST)
                factors.append(self._factor(weight + here, is_laid_out=False))
            self._add(factors, [each + number * kind.block_bytes for each in x], found)
        with code.when((columns % step).compare(">", 0)):
            tails = [self.tails + number * kind.block_bytes for number in range(begin, end)]
            factors = [self._factor(tail, is_laid_out=True) for tail in tails]
            self._add(factors, [each + (blocks - 1) * kind.block_bytes for each in x], found)
        return found

    def _factor(self, address: Int, *, is_laid_out: bool) -> ir.Value:
        """Load the operand of a multiplication, 16 numbers or pairs, of the weight's type or as it is laid out."""
        code, kind = self.frame.code, self.frame.kind
        if kind.instructions is Instructions.WIDENED:
            return code.load(address, MAX_LANES, kind.packed if is_laid_out else kind.weight).ir
        pairs = ir.VectorType(ir.IntType(32), MAX_LANES)
        return code.builder.load(code.builder.inttoptr(address.ir, pairs.as_pointer()), align=2)

    def _add(self, factors: list[ir.Value], x: list[Int], sums: list[Accumulator]) -> None:
        for row, address in enumerate(x):
            other = self._factor(address, is_laid_out=True)
            for number, factor in enumerate(factors):
                total = sums[row * len(factors) + number]
                total.set(self._multiply_add(total.get(), factor, other))

    def _multiply_add(self, total: Vector, factor: ir.Value, other: ir.Value) -> Vector:
        b = self.frame.code.builder
        if self.frame.kind.instructions is Instructions.WIDENED:
            return Vector(b, factor).times_plus(Vector(b, other), total)
        return add_products(total, factor, other)


def _lay_out(frame: Frame, number: Int) -> None:
    """Lay out a group of rows: each by itself, filled up with zeros."""
    code, kind = frame.code, frame.kind
    columns, step, hidden = frame.get("columns"), kind.instructions.columns, kind.hidden
    tail = columns % step
    stride = (columns + (step - 1)) // step * kind.block_bytes
    first = number * ROW_GROUP
    with code.loop(first, (first + ROW_GROUP).at_most(frame.get("rows"))) as row:
        source = frame.get("x") + row * frame.get("x_stride")
        target = frame.get("packed") + row * stride
        with code.loop(0, columns - tail, MAX_LANES) as column:
            numbers = frame.rounded(code.load(source + column * hidden.size, MAX_LANES, hidden))
            code.store(numbers, target + column * kind.packed.size, kind.packed)
        with code.when(tail.compare(">", 0)):
            behind = columns - tail
            frame.copy_row(source + behind * hidden.size, target + behind * kind.packed.size, tail, hidden)
