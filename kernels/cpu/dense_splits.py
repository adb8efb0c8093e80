"""Products with dense float32 weights in tiles of bfloat16 (AMX): each number is the sum of three of bfloat16.

A float32 has 24 bits, a bfloat16 has 8: a number is divided into a high, a middle and a low part, whose sum is exactly
the number. Of the nine products of two numbers' parts six are summed; the other three are together at most 2**-22 of
the whole, and of either sign, because the parts of x are rounded to nearest. So a result is as near to the exact one as
the library's sum of float32 products.

Tiles multiply sixteen times as fast as vectors of float32. Weights are divided while they are multiplied, so that they
take no more memory; rows of x are divided once, where they are laid out. Columns are paired with those 16 places
further on, which costs nothing to lay out. Numbers that are not finite give NaN, and those below 1e-33 lose bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, CacheLevel, Code, Int, Vector, define
from nbengine.kernels.cpu.dense_parts import DenseKind, Frame
from nbengine.kernels.cpu.dense_tiles import OUTPUTS, tiles_of_rows, write_sums
from nbengine.kernels.cpu.matrix_tiles import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, Tiles, tile_shapes
from nbengine.kernels.cpu.shuffles import transpose

PARTS = 3
"""The numbers of bfloat16 of which a float32 is the sum."""
_COLUMNS = 32
_FLOAT = 4
_ROW_BYTES = _COLUMNS * _FLOAT
_SPLIT_BYTES = PARTS * TILE_BYTES
_PAIR = 2
_WEIGHT, _X = 4, 7
"""The first tile of the weight's parts, and the tile of a part of x; those before them hold the sums."""
_HIGH_BITS, _HALF = 0xFFFF0000, 0x8000


def split_shapes() -> int:
    """Return the address of the tiles' shapes."""
    return int(tile_shapes((TILE_ROWS,) * 8).ctypes.data)


def define_splits(module: ir.Module, name: str, kind: DenseKind) -> None:
    """Define the function of `DenseArguments`."""
    lay_out = define(module, "lay_out", 2, partial(_lay_out, kind))
    write = define(module, "write", 6, partial(write_sums, kind))
    define(module, name, 1, partial(_multiply, kind, lay_out, write), exported=True)


def _multiply(kind: DenseKind, lay_out: ir.Function, write: ir.Function, code: Code, args: Int) -> None:
    frame, tiles = Frame.of_calls(code, args, kind), Tiles(code)
    frame.lay_out_rows(lambda number: code.call(lay_out, args, number))
    tiles.configure(frame.get("shapes"))
    out_features, columns, stride = (frame.get(name) for name in ("out_features", "columns", "weight_stride"))
    height, tail = out_features.at_most(TILE_ROWS), columns % _COLUMNS
    blocks = (columns + (_COLUMNS - 1)) // _COLUMNS
    memory, tail_parts = _own_memory(frame, blocks), code.stack(_PAIR * _SPLIT_BYTES)
    tails, position, scratch = (
        code.stack(_PAIR * TILE_ROWS * _ROW_BYTES),
        code.stack(8),
        code.stack(TILE_BYTES),
    )
    # Where the weight has fewer rows than a tile, the last one takes the others' places.
    places = [(height - 1).at_most(row) for row in range(TILE_ROWS)]
    for group, start, stop in frame.products():
        # The last tile begins where it ends with the matrix, and computes some outcomes again.
        firsts = [
            (group * OUTPUTS + number * TILE_ROWS).at_most(out_features - height) for number in range(_PAIR)
        ]
        weights = [frame.get("weight") + first * stride for first in firsts]
        rows = [weight + place * stride for weight in weights for place in places]
        # What is multiplied once needs no more than two places, which the first cache holds.
        is_once = (stop - start).compare("<=", _PAIR * TILE_ROWS)
        strip = _Strip(code, memory, code.integer(1).if_else(is_once, code.integer(-1)))
        divide = _Division(code, rows, stride * OUTPUTS)
        with code.when(tail.compare(">", 0)):
            padded = [tails + number * _ROW_BYTES for number in range(_PAIR * TILE_ROWS)]
            for source, target in zip(rows, padded, strict=True):
                _copy_tail(code, source + (columns - tail) * _FLOAT, target, tail)
            for _ in _Division(code, padded, None).of(code.integer(0), tail_parts):
                pass
        for row, count, is_first in tiles_of_rows(code, position, start, stop):
            # The first rows divide the weight, for all that follow.
            _Product(frame, tiles, strip, tail_parts, row, count).multiply(divide if is_first else None)
            for (half, first), number in product(enumerate(firsts), range(count)):
                tiles.store(_sums(half, number), scratch, code.integer(TILE_ROW_BYTES))
                place = row + number * TILE_ROWS
                code.call(write, args, scratch, place, (stop - place).at_most(TILE_ROWS), first, height)
    tiles.release()


def _own_memory(frame: Frame, blocks: Int) -> Int:
    """Return this thread's memory for the parts of a group of the weight's rows."""
    size = blocks * _SPLIT_BYTES
    # With one place more, to which the last block is divided again.
    number = frame.code.fetch_add(frame.place("threads"), 1)
    return frame.get("packed") + frame.row_groups * size + number * ((size + _SPLIT_BYTES) * _PAIR)


def _sums(half: int, number: int) -> int:
    """Return the tile of the sums of one of the weight's tiles with one of x."""
    return _PAIR * half + number


@dataclass(frozen=True)
class _Strip:
    """The places of the parts of two tiles' rows of the weight, for all blocks of columns, or, with `mask` 1, for two."""

    code: Code
    memory: Int
    mask: Int

    def at(self, block: Int) -> Int:
        """Return the place of a block's parts."""
        kept = Int(self.code.builder, self.code.builder.and_(block.ir, self.mask.ir))
        return self.memory + kept * (_PAIR * _SPLIT_BYTES)


@dataclass(frozen=True)
class _Division:
    """The division of the numbers of two tiles' rows into parts. What the rows `ahead` bytes further on have is
    brought to the cache."""

    code: Code
    rows: list[Int]
    ahead: Int | None

    def of(self, block: Int, at: Int) -> Iterator[None]:
        """Divide a block of columns, a row at a time, and store the parts at an address."""
        code = self.code
        for number, row in enumerate(self.rows):
            here = row + block * _ROW_BYTES
            if self.ahead is not None:
                for line in range(0, _ROW_BYTES, TILE_ROW_BYTES):
                    code.prefetch(here + self.ahead + line, CacheLevel.SECOND)
            half, place = divmod(number, TILE_ROWS)
            for part, pairs in enumerate(_parts(code, here, rounds=False)):
                code.store_lanes(pairs, at + ((half * PARTS + part) * TILE_BYTES + place * TILE_ROW_BYTES))
            yield


@dataclass(frozen=True)
class _Product:
    """The product of a strip, two tiles' rows of the weight in parts, with `count` tiles of x, whose first row is
    `row`."""

    frame: Frame
    tiles: Tiles
    strip: _Strip
    tail_parts: Int
    row: Int
    count: int

    def multiply(self, divide: _Division | None) -> None:
        """Sum along the columns; with `divide`, blocks of columns but for the last columns are divided before."""
        code, columns = self.frame.code, self.frame.get("columns")
        whole, zero = columns // _COLUMNS, code.integer(0)
        for half, number in product(range(_PAIR), range(self.count)):
            self.tiles.zero(_sums(half, number))
        if divide is not None:
            with code.when(whole.compare(">", 0)):
                for _ in divide.of(zero, self.strip.at(zero)):
                    pass
        with code.loop(zero, whole) as block:
            # Behind the last block it is divided again, to the place that is not read now.
            division: Iterator[None] = iter(())
            if divide is not None:
                division = divide.of((block + 1).at_most(whole - 1), self.strip.at(block + 1))
            self._add(block, self.strip.at(block), division)
        with code.when((columns % _COLUMNS).compare(">", 0)):
            self._add(whole, self.tail_parts, iter(()))

    def _add(self, block: Int, weight: Int, division: Iterator[None]) -> None:
        """Add the products of a block, while vectors divide the next one."""
        tiles, line = self.tiles, self.frame.code.integer(TILE_ROW_BYTES)
        size = (self.frame.get("columns") + (_COLUMNS - 1)) // _COLUMNS * _SPLIT_BYTES
        x = self.frame.get("packed") + self.row // TILE_ROWS * size + block * _SPLIT_BYTES
        products = _PAIR * self.count * PARTS * (PARTS + 1) // 2
        rows_at_a_time = -(-_PAIR * TILE_ROWS // products)
        for half in range(_PAIR):
            for part in range(PARTS):
                tiles.load(_WEIGHT + part, weight + (half * PARTS + part) * TILE_BYTES, line)
            # What is small is added first.
            for part, number in product(reversed(range(PARTS)), range(self.count)):
                tiles.load(_X, x + size * number + part * TILE_BYTES, line)
                for other in reversed(range(PARTS - part)):
                    tiles.add_product(_sums(half, number), _WEIGHT + other, _X)
                    for _ in range(rows_at_a_time):
                        next(division, None)
        for _ in division:
            pass


def _parts(code: Code, address: Int, *, rounds: bool) -> list[ir.Value]:
    """Load 32 numbers; return the pairs of their high, middle and low parts, rounded to nearest or cut off."""
    b, words = code.builder, ir.VectorType(ir.IntType(32), MAX_LANES)
    rests = [code.load(address + half * MAX_LANES * _FLOAT, MAX_LANES) for half in (0, 1)]
    found = []
    for _ in range(PARTS):
        bits = [b.bitcast(rest.ir, words) for rest in rests]
        if rounds:
            bits = [b.add(each, words([_HALF] * MAX_LANES)) for each in bits]
        bits = [b.and_(each, words([_HIGH_BITS] * MAX_LANES)) for each in bits]
        found.append(b.or_(b.lshr(bits[0], words([16] * MAX_LANES)), bits[1]))
        rests = [
            rest - Vector(b, b.bitcast(own, rest.ir.type)) for rest, own in zip(rests, bits, strict=True)
        ]
    return found


def _copy_tail(code: Code, source: Int, target: Int, count: Int) -> None:
    """Copy the last `count` numbers of a row, fewer than a block has, and fill up with zeros."""
    for at in range(0, _ROW_BYTES, TILE_ROW_BYTES):
        code.store(code.constant(0.0, MAX_LANES), target + at)
    code.copy_bytes(source, target, count * _FLOAT)


def _lay_out(kind: DenseKind, code: Code, args: Int, number: Int) -> None:
    """Lay out the parts of 16 rows of x as tiles; where there are fewer, the last one takes the others' places."""
    frame = Frame(code, args, kind)
    rows, columns = frame.get("rows"), frame.get("columns")
    tail, size = columns % _COLUMNS, (columns + (_COLUMNS - 1)) // _COLUMNS * _SPLIT_BYTES
    target = frame.get("packed") + number * size
    places = [(number * TILE_ROWS + place).at_most(rows - 1) for place in range(TILE_ROWS)]
    sources = [frame.get("x") + place * frame.get("x_stride") for place in places]
    with code.loop(0, columns // _COLUMNS) as block:
        _store_tiles(code, [source + block * _ROW_BYTES for source in sources], target + block * _SPLIT_BYTES)
    with code.when(tail.compare(">", 0)):
        filled = code.stack(TILE_ROWS * _ROW_BYTES)
        own = [filled + place * _ROW_BYTES for place in range(TILE_ROWS)]
        for source, row in zip(sources, own, strict=True):
            _copy_tail(code, source + (columns - tail) * _FLOAT, row, tail)
        _store_tiles(code, own, target + (size - _SPLIT_BYTES))


def _store_tiles(code: Code, rows: list[Int], target: Int) -> None:
    for part, pairs in enumerate(zip(*[_parts(code, row, rounds=True) for row in rows], strict=True)):
        for number, column in enumerate(transpose(code, list(pairs))):
            code.store_lanes(column, target + (part * TILE_BYTES + number * TILE_ROW_BYTES))
