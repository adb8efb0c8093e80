"""Products with dense bfloat16 weights in tiles (AMX): 32 rows of the weight with up to 32 rows of x.

The weight is the left operand, whose tiles are loaded from the matrix as it lies; rows of x are laid out in pairs of
columns, 16 rows a tile, and every outcome is summed along the columns in their order. A row that has no neighbours
in its tile is computed like one that has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, CacheLevel, Code, Element, Int, Vector, define
from nbengine.kernels.cpu.dense_parts import DenseKind, Frame
from nbengine.kernels.cpu.matrix_tiles import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, Tiles, tile_shapes
from nbengine.kernels.cpu.shuffles import transpose

OUTPUTS = 2 * TILE_ROWS
"""Rows of the weight that are multiplied at a time."""
_PAIR = 2
_WEIGHT, _X = 4, 6
"""The first tiles of the weight and of x; those before them hold the sums."""
_COLUMNS = 32
_SIZE = 2
_LINES = 32
"""Cache lines of the weight that a step along the columns multiplies."""


def shapes_for(out_features: int) -> int:
    """Return the address of the tiles' shapes for a weight with that many rows."""
    own = min(TILE_ROWS, out_features)
    return int(tile_shapes((own,) * 6 + (TILE_ROWS,) * 2).ctypes.data)


def define_tiles(module: ir.Module, name: str, kind: DenseKind) -> None:
    """Define the function of `DenseArguments`."""
    lay_out = define(module, "lay_out", 2, partial(_lay_out, kind))
    write = define(module, "write", 6, partial(write_sums, kind))
    define(module, name, 1, partial(_multiply, kind, lay_out, write), exported=True)


def _multiply(kind: DenseKind, lay_out: ir.Function, write: ir.Function, code: Code, args: Int) -> None:
    frame, tiles = Frame.of_calls(code, args, kind), Tiles(code)
    frame.lay_out_rows(lambda number: code.call(lay_out, args, number))
    tiles.configure(frame.get("shapes"))
    out_features, columns = frame.get("out_features"), frame.get("columns")
    height, stride = out_features.at_most(TILE_ROWS), frame.get("weight_stride")
    tail = columns % _COLUMNS
    tails, position = code.stack(_PAIR * TILE_BYTES), code.stack(8)
    for group, start, stop in frame.products():
        # The last tile begins where it ends with the matrix, and computes some outcomes again.
        firsts = [
            (group * OUTPUTS + number * TILE_ROWS).at_most(out_features - height) for number in range(_PAIR)
        ]
        weights = [frame.get("weight") + first * stride for first in firsts]
        with code.when(tail.compare(">", 0)):
            for number, weight in enumerate(weights):
                with code.loop(0, height) as row:
                    source = weight + row * stride + (columns - tail) * _SIZE
                    target = tails + (number * TILE_BYTES) + row * TILE_ROW_BYTES
                    frame.copy_row(source, target, tail, kind.weight)
        for row, count, is_first in tiles_of_rows(code, position, start, stop):
            it = _Product(frame, tiles, weights, tails, row, count)
            # The first rows bring the weight's next part to the cache, for all that follow.
            it.multiply(prefetches=is_first)
            it.write(write, firsts, height, stop)
    tiles.release()


def tiles_of_rows(code: Code, position: Int, start: Int, stop: Int) -> Iterator[tuple[Int, int, bool]]:
    """Divide the rows of x from `start` to `stop` into pairs of tiles and a last tile, and yield the first row of each, the
    number of tiles, and whether it is the first. `position` is the address of a number, for the row that is next."""
    code.store_int(start, position)
    for count, is_first in product((_PAIR, 1), (True, False)):

        def remains(count: int = count, is_first: bool = is_first) -> ir.Value:
            row = code.load_int(position)
            found = (stop - row).compare(">", (count - 1) * TILE_ROWS)
            return code.builder.and_(found, row.compare("==", start)) if is_first else found

        with code.loop_while(remains):
            row = code.load_int(position)
            yield row, count, is_first
            code.store_int(row + count * TILE_ROWS, position)


@dataclass(frozen=True)
class _Product:
    """The product of two tiles of the weight with `count` tiles of x, whose first row is `row`."""

    frame: Frame
    tiles: Tiles
    weights: list[Int]
    tails: Int
    row: Int
    count: int

    def multiply(self, *, prefetches: bool) -> None:
        """Sum along the columns."""
        frame, code, tiles = self.frame, self.frame.code, self.tiles
        columns, stride, line = (
            frame.get("columns"),
            frame.get("weight_stride"),
            code.integer(TILE_ROW_BYTES),
        )
        blocks = (columns + (_COLUMNS - 1)) // _COLUMNS
        size = blocks * TILE_BYTES
        x = [frame.get("packed") + (self.row // TILE_ROWS + number) * size for number in range(self.count)]
        for number in range(_PAIR * self.count):
            tiles.zero(self._sums(number // self.count, number % self.count))
        ahead = self.weights[0] + stride * OUTPUTS
        with code.loop(0, columns // _COLUMNS) as block:
            if prefetches:
                for number in range(_LINES):
                    at = ahead + block * (_LINES * TILE_ROW_BYTES) + number * TILE_ROW_BYTES
                    code.prefetch(at, CacheLevel.SECOND)
            for number, weight in enumerate(self.weights):
                tiles.load(_WEIGHT + number, weight + block * TILE_ROW_BYTES, stride)
            self._add([each + block * TILE_BYTES for each in x], line)
        with code.when((columns % _COLUMNS).compare(">", 0)):
            for number in range(_PAIR):
                tiles.load(_WEIGHT + number, self.tails + number * TILE_BYTES, line)
            self._add([each + (blocks - 1) * TILE_BYTES for each in x], line)

    def write(self, function: ir.Function, firsts: list[Int], height: Int, stop: Int) -> None:
        """Store the results of the rows before `stop`."""
        code, args = self.frame.code, self.frame.args
        scratch = code.stack(TILE_BYTES)
        for number in range(self.count):
            row = self.row + number * TILE_ROWS
            for half, first in enumerate(firsts):
                self.tiles.store(self._sums(half, number), scratch, code.integer(TILE_ROW_BYTES))
                code.call(function, args, scratch, row, (stop - row).at_most(TILE_ROWS), first, height)

    def _add(self, x: list[Int], line: Int) -> None:
        for number, address in enumerate(x):
            self.tiles.load(_X + number, address, line)
            for half in range(_PAIR):
                self.tiles.add_product(self._sums(half, number), _WEIGHT + half, _X + number)

    @staticmethod
    def _sums(half: int, number: int) -> int:
        return _PAIR * half + number


def write_sums(
    kind: DenseKind, code: Code, args: Int, sums: Int, row: Int, rows: Int, first: Int, height: Int
) -> None:
    """Store a tile of sums [weight's rows, rows of x] as results [rows of x, weight's rows]."""
    frame = Frame(code, args, kind)
    turned = code.stack(TILE_BYTES)
    found = [code.load(sums + number * TILE_ROW_BYTES, MAX_LANES).ir for number in range(TILE_ROWS)]
    for number, column in enumerate(transpose(code, found)):
        code.store(Vector(code.builder, column), turned + number * TILE_ROW_BYTES)
    with code.loop(0, rows) as place:
        frame.write(code.load(turned + place * TILE_ROW_BYTES, MAX_LANES), row + place, first, height)


def _lay_out(kind: DenseKind, code: Code, args: Int, number: Int) -> None:
    """Lay out 16 rows of x as tiles; where there are fewer, the last one takes the others' places."""
    frame = Frame(code, args, kind)
    rows, columns, hidden = frame.get("rows"), frame.get("columns"), kind.hidden
    tail, size = columns % _COLUMNS, (columns + (_COLUMNS - 1)) // _COLUMNS * TILE_BYTES
    target = frame.get("packed") + number * size
    places = [(number * TILE_ROWS + place).at_most(rows - 1) for place in range(TILE_ROWS)]
    sources = [frame.get("x") + place * frame.get("x_stride") for place in places]
    with code.loop(0, columns // _COLUMNS) as block:
        here = [source + block * (_COLUMNS * hidden.size) for source in sources]
        _store_tile(code, here, target + block * TILE_BYTES, _loader(code, hidden))
    with code.when(tail.compare(">", 0)):
        scratch = code.stack(TILE_BYTES)
        filled = [scratch + place * TILE_ROW_BYTES for place in range(TILE_ROWS)]
        for place, row in enumerate(filled):
            frame.copy_row(sources[place] + (columns - tail) * hidden.size, row, tail, hidden)
        _store_tile(code, filled, target + (size - TILE_BYTES), _loader(code, Element.BFLOAT16))


def _loader(code: Code, element: Element) -> Callable[[Int], ir.Value]:
    """Return what loads 32 numbers as 16 pairs of bfloat16."""
    b, pairs = code.builder, ir.VectorType(ir.IntType(32), MAX_LANES)

    def load(address: Int) -> ir.Value:
        if element is Element.BFLOAT16:
            return b.bitcast(code.load_bits(address, _COLUMNS, element), pairs)
        halves = [code.load(address + half * MAX_LANES * element.size, MAX_LANES, element) for half in (0, 1)]
        low, high = (code.narrowed(half, Element.BFLOAT16) for half in halves)
        lanes = ir.VectorType(ir.IntType(32), _COLUMNS)(list(range(_COLUMNS)))
        return b.bitcast(b.shuffle_vector(low, high, lanes), pairs)

    return load


def _store_tile(code: Code, rows: list[Int], target: Int, load: Callable[[Int], ir.Value]) -> None:
    for number, pairs in enumerate(transpose(code, [load(row) for row in rows])):
        code.store_lanes(pairs, target + number * TILE_ROW_BYTES)
