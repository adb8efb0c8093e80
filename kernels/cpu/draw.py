"""The draw of a token from a row of logits: one random number, inverted through the row's cumulative distribution.

What torch's operations would do in a dozen calls, each of which finds the caches full of weights, is one call here. A row
that keeps all tokens is walked in their order; one with filters from the most to the least likely token that it keeps.
The semantics are those of `nbengine.sampling.draw`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Int, Vector, define
from nbengine.kernels.cpu.doubles import Double
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.draw_parameters import DRAW_ROW, UNDECIDED, place_of

MOST_KEPT = 1024
"""Tokens that are looked at for filters; with more, the token is `UNDECIDED`."""
_CHUNK = 256
_FLOAT, _WORD = 4, 8
_LOG2E = math.log2(math.e)
_FIRST_DEPTH, _LAST_DEPTH = 6.0, 100.0
"""The first depth to which the most likely tokens are looked for without min-p, which doubles until it is enough, and the
one beyond which all are taken: binary logarithms of how many times tokens are less likely than the likeliest one."""
_BELOW_ONE = 1 - 2.0**-52
_MARGIN = 1 + 1e-6
"""Sums of other orders differ by less."""


def scratch_bytes(width: int) -> int:
    """Return the bytes that a row of `width` logits needs beside it."""
    return (-(-width // _CHUNK) + 3 * MOST_KEPT) * _WORD


class DrawArguments(ctypes.Structure):
    """The addresses, strides in bytes, and counts.

    The `items` are rows of `width` float32 logits at `x`, with a `DRAW_ROW` each at `rows` and memory of their own at `scratch`. `ids`,
    int64, gets the tokens, `masses`, float64, the sum of each row's weights, of which the largest is 1. Where it is not
    finite, the token is `nothing`: it is minus infinity if all logits are, and NaN where some logit is NaN or infinity.
    Rows whose inverse is 0 are greedy: their tokens are those at `greedy`, and nothing is said of their masses.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "width", "x", "x_stride"),
            *("rows", "scratch", "scratch_stride", "ids", "masses"),
            *("greedy", "nothing"),
        )
    ]


@cache
def compile_draw() -> Function:
    """Compile the function of `DrawArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define, ["draw"])
    return function


def _define(module: ir.Module) -> None:
    define(module, "draw", 1, _draw, exported=True)


def _draw(code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(DrawArguments, name).offset)

    with code.tickets(args + DrawArguments.counter.offset, get("items")) as item:
        token, params = get("ids") + item * _WORD, get("rows") + item * DRAW_ROW.itemsize
        is_greedy = _holds(code, "==", code.load(params + place_of("inverse")), code.constant(0.0))
        with code.builder.if_else(is_greedy) as (then, otherwise):
            with then:
                code.store_int(code.load_int(get("greedy") + item * _WORD), token)
            with otherwise:
                _draw_row(code, get, item, token, params)


def _draw_row(code: Code, get: Callable[[str], Int], item: Int, token: Int, params: Int) -> None:
    row = _Row(
        code,
        width=get("width"),
        x=get("x") + item * get("x_stride"),
        params=params,
        scratch=get("scratch") + item * get("scratch_stride"),
        token=token,
    )
    row.find_peak()
    total = row.weigh()
    mass = get("masses") + item * _WORD
    total.store(mass)
    code.store_int(get("nothing"), token)
    is_finite = total.compare("<", Double.constant(code, math.inf))
    with code.when(is_finite), code.builder.if_else(row.is_filtered()) as (then, otherwise):
        with then:
            _from_the_likeliest(row, total)
        with otherwise:
            _in_order(row, total)
    with code.when(code.builder.not_(is_finite)):
        row.tell_nothing(mass)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A number on the stack that loops change."""

    code: Code
    address: Int

    @classmethod
    def of(cls, code: Code, value: Int | Double) -> _Cell:
        cell = cls(code, code.stack(_WORD))
        cell.set(value)
        return cell

    def set(self, value: Int | Double) -> None:
        if isinstance(value, Double):
            value.store(self.address)
        else:
            self.code.store_int(value, self.address)

    @property
    def int(self) -> Int:
        return self.code.load_int(self.address)

    @property
    def double(self) -> Double:
        return Double.load(self.code, self.address)


class _Row:
    """A row of logits with its parameters and its memory: masses of chunks, weights, and the most likely tokens with their
    logits, the likeliest first."""

    def __init__(self, code: Code, width: Int, x: Int, params: Int, scratch: Int, token: Int) -> None:
        self.code, self.width, self.x, self.token = code, width, x, token
        self._params = params
        self.num_chunks = (width + (_CHUNK - 1)) // _CHUNK
        self.masses = scratch
        self.weights = self.masses + self.num_chunks * _WORD
        self.logits = self.weights + MOST_KEPT * _WORD
        self.ids = self.logits + MOST_KEPT * _WORD
        inverse = code.load(params + place_of("inverse"))
        self._factor = inverse * code.constant(_LOG2E)
        self._peak = code.accumulator(code.constant(-math.inf))

    def parameter(self, name: str) -> Double:
        return Double.load(self.code, self._params + place_of(name))

    @property
    def top_k(self) -> Int:
        return self.code.load_int(self._params + place_of("top_k"))

    def is_cut(self) -> ir.Value:
        """Return whether there is a top-p."""
        return self.parameter("top_p").compare("<", Double.constant(self.code, 1.0))

    def has_min_p(self) -> ir.Value:
        number = self.code.load(self._params + place_of("log_min_p"))
        return _holds(self.code, ">", number, self.code.constant(-math.inf))

    def min_p_depth(self) -> Vector:
        """Return the depth to which min-p keeps tokens."""
        bits = self.code.load(self._params + place_of("log_min_p")) * self.code.constant(_LOG2E)
        return self.code.constant(0.0) - bits

    def is_filtered(self) -> ir.Value:
        b = self.code.builder
        return b.or_(b.or_(self.top_k.compare(">", 0), self.is_cut()), self.has_min_p())

    def find_peak(self) -> None:
        """Find the largest logit."""
        code = self.code
        whole = self.width // MAX_LANES * MAX_LANES
        lanes = code.accumulator(code.constant(-math.inf, MAX_LANES))
        with code.loop(0, whole, MAX_LANES) as column:
            lanes.set(code.load(self.x + column * _FLOAT, MAX_LANES).at_least(lanes.get()))
        self._peak.set(lanes.get().reduce(Vector.at_least))
        with code.loop(whole, self.width) as column:
            self._peak.set(code.load(self.x + column * _FLOAT).at_least(self._peak.get()))

    def tell_nothing(self, mass: Int) -> None:
        """Make the mass minus infinity if all logits are."""
        code, b = self.code, self.code.builder
        low = code.constant(-math.inf)
        others = _Cell.of(code, code.integer(0))
        with code.loop(0, self.width) as column:
            logit = code.load(self.x + column * _FLOAT)
            with code.when(b.not_(_holds(code, "==", logit, low))):
                others.set(code.integer(1))
        with code.when(others.int.compare("==", 0)):
            Double.constant(code, -math.inf).store(mass)

    def depth(self, logits: Vector) -> Vector:
        """Return the binary logarithms of the weights of logits."""
        lanes = logits.lanes
        return (logits - self._peak.get().splat(lanes)) * self._factor.splat(lanes)

    def weight(self, column: Int, lanes: int = 1) -> Vector:
        """Return the weights of neighbouring tokens."""
        return self.code.exp2(self.depth(self.code.load(self.x + column * _FLOAT, lanes)))

    def weigh(self) -> Double:
        """Add up the weights of each chunk; return the sum of all."""
        code = self.code
        total = _Cell.of(code, Double.constant(code, 0.0))
        with code.loop(0, self.num_chunks) as chunk:
            begin = chunk * _CHUNK
            end = (begin + _CHUNK).at_most(self.width)
            whole = begin + (end - begin) // MAX_LANES * MAX_LANES
            lanes = code.accumulator(code.constant(0.0, MAX_LANES))
            with code.loop(begin, whole, MAX_LANES) as column:
                lanes.set(lanes.get() + self.weight(column, MAX_LANES))
            mass = code.accumulator(lanes.get().reduce(Vector.__add__))
            with code.loop(whole, end) as column:
                mass.set(mass.get() + self.weight(column))
            wide = Double.of(mass.get())
            wide.store(self.masses + chunk * _WORD)
            total.set(total.double + wide)
        return total.double


def _first_beyond(code: Code, numbers: Int, count: Int, target: Double) -> tuple[Int, Double]:
    """Return the place of the first of float64 `numbers` at which their sum is beyond `target`, at most the last one, and
    the sum of those before it."""
    place, before = _Cell.of(code, code.integer(0)), _Cell.of(code, Double.constant(code, 0.0))

    def goes_on() -> ir.Value:
        after = before.double + Double.load(code, numbers + place.int * _WORD)
        is_reached = after.compare(">", target)
        return code.builder.and_(code.builder.not_(is_reached), (place.int + 1).compare("<", count))

    with code.loop_while(goes_on):
        before.set(before.double + Double.load(code, numbers + place.int * _WORD))
        place.set(place.int + 1)
    return place.int, before.double


def _in_order(row: _Row, total: Double) -> None:
    """Draw from all tokens: find the chunk, then the token in it, whose weights are computed again."""
    code = row.code
    target = row.parameter("uniform") * total
    chunk, before = _first_beyond(code, row.masses, row.num_chunks, target)
    mass = Double.load(code, row.masses + chunk * _WORD)
    zero, below_one = Double.constant(code, 0.0), Double.constant(code, _BELOW_ONE)
    fraction = ((target - before) / mass).at_least(zero).at_most(below_one)
    first = chunk * _CHUNK
    count = (row.width - first).at_most(_CHUNK)
    inside = _Cell.of(code, zero)
    with code.loop(0, count) as place:
        weight = Double.of(row.weight(first + place))
        weight.store(row.weights + place * _WORD)
        inside.set(inside.double + weight)
    place, _ = _first_beyond(code, row.weights, count, fraction * inside.double)
    code.store_int(first + place, row.token)


def _from_the_likeliest(row: _Row, total: Double) -> None:
    """Draw from the tokens that the filters keep, of which the likeliest is the first."""
    code = row.code
    code.store_int(code.integer(UNDECIDED), row.token)
    count, is_enough = _Cell.of(code, code.integer(0)), _Cell.of(code, code.integer(0))
    depth = code.accumulator(code.constant(_FIRST_DEPTH))
    with code.when(row.has_min_p()):
        depth.set(row.min_p_depth())
    with code.loop_while(lambda: is_enough.int.compare("==", 0)):
        _collect(row, depth.get(), count)
        _judge(row, depth.get(), total, count.int, is_enough)
        deeper, b = depth.get() + depth.get(), code.builder
        is_last = b.fcmp_ordered(">", deeper.ir, code.constant(_LAST_DEPTH).ir)
        depth.set(Vector(b, b.select(is_last, code.constant(math.inf).ir, deeper.ir)))
    with code.when(is_enough.int.compare(">", 0)):
        _draw_kept(row, total, count.int)


def _collect(row: _Row, depth: Vector, count: _Cell) -> None:
    """Collect the tokens down to a depth, sorted: the largest logit first, and the lowest of equal ones. With too many, the
    count is one more than there is room for."""
    code, b = row.code, row.code.builder
    count.set(code.integer(0))
    whole = row.width // MAX_LANES * MAX_LANES
    lowest = code.constant(0.0) - depth
    limit = lowest.splat(MAX_LANES)
    bits = ir.IntType(MAX_LANES)

    def take(column: Int) -> None:
        logit = code.load(row.x + column * _FLOAT)
        is_in = _holds(code, ">=", row.depth(logit), lowest)
        has_room = count.int.compare("<=", MOST_KEPT)
        with code.when(b.and_(is_in, has_room)):
            with code.when(count.int.compare("<", MOST_KEPT)):
                _insert(row, Double.of(logit), column, count.int)
            count.set(count.int + 1)

    with code.loop(0, whole, MAX_LANES) as column:
        found = b.fcmp_ordered(">=", row.depth(code.load(row.x + column * _FLOAT, MAX_LANES)).ir, limit.ir)
        some = b.icmp_unsigned("!=", b.bitcast(found, bits), bits(0))
        with code.when(some), code.loop(column, column + MAX_LANES) as each:
            take(each)
    with code.loop(whole, row.width) as column:
        take(column)


def _holds(code: Code, operator: str, one: Vector, other: Vector) -> ir.Value:
    """Compare the first lanes of two vectors."""
    b, first = code.builder, ir.IntType(32)(0)
    return b.extract_element(b.fcmp_ordered(operator, one.ir, other.ir), first)


def _insert(row: _Row, logit: Double, token: Int, count: Int) -> None:
    """Insert a token behind all whose logit is not smaller."""
    code = row.code
    place = _Cell.of(code, count)

    def is_behind() -> ir.Value:
        before = (place.int - 1).at_least(code.integer(0))
        smaller = Double.load(code, row.logits + before * _WORD).compare("<", logit)
        return code.builder.and_(place.int.compare(">", 0), smaller)

    with code.loop_while(is_behind):
        source, target = place.int - 1, place.int
        Double.load(code, row.logits + source * _WORD).store(row.logits + target * _WORD)
        code.store_int(code.load_int(row.ids + source * _WORD), row.ids + target * _WORD)
        place.set(source)
    logit.store(row.logits + place.int * _WORD)
    code.store_int(token, row.ids + place.int * _WORD)


def _judge(row: _Row, depth: Vector, total: Double, count: Int, is_enough: _Cell) -> None:
    """Set `is_enough` to 1 if what the filters keep can be told from the tokens that were collected, and to -1 if there are
    too many."""
    code, b = row.code, row.code.builder
    top_k, top_p = row.top_k, row.parameter("top_p")
    collected = _Cell.of(code, Double.constant(code, 0.0))
    with code.when(count.compare("<=", MOST_KEPT)), code.loop(0, count) as place:
        weight = Double.of(row.weight(code.load_int(row.ids + place * _WORD)))
        weight.store(row.weights + place * _WORD)
        collected.set(collected.double + weight)
    needed = top_p * total * Double.constant(code, _MARGIN)
    has_mass = b.and_(row.is_cut(), collected.double.compare(">=", needed))
    conditions = (
        b.and_(top_k.compare(">", 0), count.compare(">=", top_k)),
        b.and_(row.has_min_p(), _holds(code, ">=", depth, row.min_p_depth())),
        # With the others on, top-p is a share of what they keep.
        b.and_(has_mass, b.not_(b.or_(top_k.compare(">", 0), row.has_min_p()))),
    )
    enough = count.compare("==", row.width)
    for condition in conditions:
        enough = b.or_(enough, condition)
    with code.when(enough):
        is_enough.set(code.integer(1))
    with code.when(count.compare(">", MOST_KEPT)):
        is_enough.set(code.integer(-1))


def _draw_kept(row: _Row, total: Double, count: Int) -> None:
    """Draw from the first of the tokens that were collected, as many as the filters keep."""
    code, b = row.code, row.code.builder
    top_k, lowest_depth = row.top_k, code.constant(0.0) - row.min_p_depth()
    has_kth = b.and_(top_k.compare(">", 0), top_k.compare("<=", count))
    lowest = _Cell.of(code, Double.constant(code, -math.inf))
    with code.when(has_kth):
        lowest.set(Double.load(code, row.logits + (top_k - 1) * _WORD))
    zero = Double.constant(code, 0.0)
    limit, mass = _Cell.of(code, code.integer(0)), _Cell.of(code, zero)

    def is_within_limits() -> ir.Value:
        at = limit.int.at_most(count - 1) * _WORD
        token = code.load_int(row.ids + at)
        depth = row.depth(code.load(row.x + token * _FLOAT))
        conditions = (
            Double.load(code, row.logits + at).compare(">=", lowest.double),
            _holds(code, ">=", depth, lowest_depth),
            Double.load(code, row.weights + at).compare(">", zero),
        )
        holds = limit.int.compare("<", count)
        for condition in conditions:
            holds = b.and_(holds, condition)
        return holds

    with code.loop_while(is_within_limits):
        mass.set(mass.double + Double.load(code, row.weights + limit.int * _WORD))
        limit.set(limit.int + 1)
    share = _Cell.of(code, Double.constant(code, math.inf))
    with code.when(row.is_cut()):
        share.set(row.parameter("top_p") * total)
        with code.when(b.or_(has_kth, row.has_min_p())):
            share.set(row.parameter("top_p") * mass.double)
    kept, before = _Cell.of(code, code.integer(0)), _Cell.of(code, zero)

    def is_kept() -> ir.Value:
        return b.and_(kept.int.compare("<", limit.int), before.double.compare("<", share.double))

    with code.loop_while(is_kept):
        before.set(before.double + Double.load(code, row.weights + kept.int * _WORD))
        kept.set(kept.int + 1)
    target = row.parameter("uniform") * before.double
    place, _ = _first_beyond(code, row.weights, kept.int, target)
    code.store_int(code.load_int(row.ids + place * _WORD), row.token)
