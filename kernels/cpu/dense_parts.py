"""The common parts of products with dense weights: arguments, the rows of x that are laid out, and how results are
stored.

Threads first draw groups of 16 rows of x, and bring them into the memory at `packed`; then, when all are there,
they draw the products. Both are drawn from one word, whose upper half counts the groups that are there: a program
sets it to 0 before each run, and no other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Element, Int, Vector
from nbengine.kernels.cpu.flags import pause
from nbengine.kernels.cpu.jit import Processor
from nbengine.kernels.cpu.matrix_tiles import has_bfloat16_tiles

ROW_GROUP = 16
"""Rows of x that are laid out at a time."""
_LINE = 64
_LAID_OUT = 1 << 32
"""A group of rows that is laid out, in the word from which numbers are drawn."""
_SPINS = 4000
"""Looks at whether all rows are laid out before the processor is given away between two looks."""


class Instructions(Enum):
    """The processor's instructions that multiply; one of them serves every number of rows."""

    TILES = "amx_bf16"
    """Tiles of 16 x 32 bfloat16 by 32 x 16."""
    PAIRS = "avx512_bf16"
    """Vectors of 16 pairs of bfloat16."""
    SPLITS = "amx_bf16 x 3"
    """Tiles of bfloat16, three to each of float32."""
    WIDENED = "float32"
    """Numbers are widened to float32, multiplied and added."""

    @classmethod
    def of(cls, processor: Processor, element: Element) -> list[Instructions]:
        """List those that a processor has for weights of a type, the fastest first."""
        found = [cls.WIDENED]
        if element is Element.BFLOAT16 and processor.features.get("avx512bf16"):
            found.insert(0, cls.PAIRS)
        if element in (Element.BFLOAT16, Element.FLOAT32) and has_bfloat16_tiles(processor):
            found.insert(0, cls.TILES if element is Element.BFLOAT16 else cls.SPLITS)
        return found

    @property
    def columns(self) -> int:
        """Return the columns that are multiplied at a time."""
        return MAX_LANES if self is Instructions.WIDENED else 2 * MAX_LANES

    def packed_element(self, weight: Element) -> Element:
        """Return the type of the rows of x that are laid out."""
        if self is Instructions.SPLITS:
            return Element.BFLOAT16
        return Element.FLOAT32 if self is Instructions.WIDENED else weight

    @property
    def parts(self) -> int:
        """Return the numbers that are laid out for each of x."""
        return 3 if self is Instructions.SPLITS else 1


class DenseArguments(ctypes.Structure):
    """The arguments: addresses, strides in bytes, and counts.

    The products are `items` of `item_size` groups of the weight's rows, `groups` in all, each with all blocks
    of `block` rows of x. `bias` is 0 where there is none, `shapes` those of tiles, `give_away` the address of
    `sched_yield`, and `threads` counts those that have taken memory of their own.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "rows", "item_size", "groups", "block"),
            *("columns", "out_features", "x", "x_stride", "packed", "weight", "weight_stride"),
            *("bias", "output", "output_stride", "shapes", "give_away", "threads"),
        )
    ]


@dataclass(frozen=True)
class DenseKind:
    """The instructions of a product, and the types of the weight and of x, bias and result: it is compiled for
    them."""

    instructions: Instructions
    weight: Element
    hidden: Element

    @property
    def packed(self) -> Element:
        """Return the type of the rows that are laid out."""
        return self.instructions.packed_element(self.weight)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of the columns of a row that are multiplied at a time, as laid out."""
        return self.instructions.columns * self.packed.size * self.instructions.parts

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of x, as laid out."""
        return -(-columns // self.instructions.columns) * self.block_bytes


def laid_out_bytes(rows: int, row_bytes: int) -> int:
    """Return the bytes of the memory for rows of x that are laid out, in groups that begin with a cache line."""
    return -(-rows // ROW_GROUP) * ROW_GROUP * row_bytes + _LINE


def most_laid_out_bytes(rows: int, columns: int) -> int:
    """Return those bytes for weights of 16 bits, whatever instructions multiply."""
    return laid_out_bytes(rows, -(-columns // (2 * MAX_LANES)) * 2 * MAX_LANES * Element.FLOAT32.size)


@dataclass(frozen=True)
class Frame:
    """A function's code and its arguments by name. `drawn` is the address of the number that a thread has drawn, in
    functions that draw."""

    code: Code
    args: Int
    kind: DenseKind
    drawn: Int | None = None

    @classmethod
    def of_calls(cls, code: Code, args: Int, kind: DenseKind) -> Frame:
        """Return that of a function that threads call together, and which draws."""
        return cls(code, args, kind, code.stack(8))

    def get(self, name: str) -> Int:
        """Load an argument."""
        return self.code.load_int(self.place(name))

    def place(self, name: str) -> Int:
        """Return an argument's address."""
        offset: int = getattr(DenseArguments, name).offset
        return self.args + offset

    @property
    def ticket(self) -> Int:
        """Return the address of the number that this thread has drawn."""
        assert self.drawn is not None
        return self.drawn

    @property
    def row_groups(self) -> Int:
        """Return the number of groups of rows of x."""
        return (self.get("rows") + (ROW_GROUP - 1)) // ROW_GROUP

    def lay_out_rows(self, lay_out: Callable[[Int], None]) -> None:
        """Emit `lay_out(number)` for each group of rows that this thread draws, and wait until all are there. The first
        number that is none of a group's is kept for `products`."""
        code, groups, counter = self.code, self.row_groups, self.place("counter")
        ticket = self.ticket
        self._draw(ticket)
        with code.loop_while(lambda: code.load_int(ticket).compare("<", groups)):
            lay_out(code.load_int(ticket))
            code.fetch_add(counter, _LAID_OUT)
            self._draw(ticket)
        spins, give_away = code.stack(8), self.get("give_away")
        code.store_int(code.integer(0), spins)
        with code.loop_while(lambda: (code.load_acquire(counter) // _LAID_OUT).compare("<", groups)):
            pause(code)
            code.store_int(code.load_int(spins) + 1, spins)
            with code.when(code.load_int(spins).compare(">", _SPINS)):
                code.call_address(give_away)

    def products(self) -> Iterator[tuple[Int, Int, Int]]:
        """Draw the products; yield the number of a group of the weight's rows, the first row of a block of x and the
        one behind its last."""
        code, size, items = self.code, self.get("item_size"), self.get("items")
        block, rows, groups = self.get("block"), self.get("rows"), self.get("groups")
        before = self.row_groups
        tickets = items * ((rows + block - 1) // block)
        with code.loop_while(lambda: (code.load_int(self.ticket) - before).compare("<", tickets)):
            ticket = code.load_int(self.ticket) - before
            first, row = ticket % items * size, ticket // items * block
            behind = (row + block).at_most(rows)
            with code.loop(first, (first + size).at_most(groups)) as group:
                yield group, row, behind
            self._draw(self.ticket)

    def _draw(self, ticket: Int) -> None:
        """Draw a number of this call's, and leave it at `ticket`."""
        drawn = self.code.fetch_add(self.place("counter"), 1)
        self.code.store_int(drawn % _LAID_OUT, ticket)

    def copy_row(self, source: Int, target: Int, count: Int, element: Element) -> None:
        """Lay out `count` numbers of a row, fewer than are multiplied at a time, and fill up with zeros."""
        code, packed = self.code, self.kind.packed
        for at in range(0, self.kind.block_bytes, 8):
            code.store_int(code.integer(0), target + at)
        with code.loop(0, count) as place:
            one = code.load(source + place * element.size, 1, element)
            code.store(self.rounded(one), target + place * packed.size, packed)

    def rounded(self, x: Vector) -> Vector:
        """Return numbers of x as they are multiplied: rounded to bfloat16 for weights of that type, so that all
        processors multiply the same numbers."""
        code, kind = self.code, self.kind
        if kind.weight is not Element.BFLOAT16 or kind.hidden is kind.weight or kind.packed is kind.weight:
            return x
        b, bits = code.builder, code.narrowed(x, kind.weight)
        words = ir.VectorType(ir.IntType(32), x.lanes)
        return Vector(b, b.bitcast(b.shl(b.zext(bits, words), words([16] * x.lanes)), x.ir.type))

    def write(self, sums: Vector, row: Int, column: Int, count: Int) -> None:
        """Store the first `count` lanes of sums, with their bias, as a row's results from `column` on."""
        code, hidden = self.code, self.kind.hidden
        bias = self.get("bias")
        bias_at = bias + column * hidden.size
        output = self.get("output") + row * self.get("output_stride") + column * hidden.size
        is_whole = count.compare(">=", sums.lanes)
        has_bias = bias.compare("!=", 0)
        with code.builder.if_else(is_whole) as (whole, part):
            with whole:
                total = code.accumulator(sums)
                with code.when(has_bias):
                    total.set(total.get() + code.load(bias_at, sums.lanes, hidden))
                code.store(total.get(), output, hidden)
            with part:
                scratch = code.stack(sums.lanes * 4)
                code.store(sums, scratch)
                with code.loop(0, count) as lane:
                    total = code.accumulator(code.load(scratch + lane * 4))
                    with code.when(has_bias):
                        total.set(total.get() + code.load(bias_at + lane * hidden.size, 1, hidden))
                    code.store(total.get(), output + lane * hidden.size, hidden)
