"""The gathering of rows over the ranks of one machine, and its counterpart, where ranks may have different
numbers of rows.

They run in phases of `nbengine.kernels.cpu.exchange`. Rank r has the elements from `starts[r]` to `starts[r +
1]` of what all have together. In a round every rank passes on the next part of its elements (gather), or of
what the others get from it (reduce-scatter): then its slot has a part for each of them. There are as many
rounds as the rank with the most needs, the same on all ranks. A sum is taken in float32, in rank order, and
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Element, Int, define
from nbengine.kernels.cpu.exchange import Rank, add_terms, define_wait_for_all
from nbengine.kernels.cpu.jit import Function, compile_module

_WORD = 8


@cache
def compile_gather_rows(size: int) -> Function:
    """Compile the function that writes the bytes of all ranks, one after the other, to `output`; `starts` and
    `total`, the most that a rank has, are in bytes.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define_gather, ["gather_rows"], size)
    return function


def _define_gather(module: ir.Module, size: int) -> None:
    wait = define_wait_for_all(module, size)
    define(module, "gather_rows", 1, partial(_gather, size, wait), exported=True)


@cache
def compile_reduce_scatter_rows(size: int, element: Element) -> Function:
    """Compile the function that writes the own part of the sum of all ranks' `x` to `output`; `starts` and
    `total`, the most that a rank gets, are in elements.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define_reduce_scatter, ["reduce_scatter_rows"], size, element)
    return function


def _define_reduce_scatter(module: ir.Module, size: int, element: Element) -> None:
    wait = define_wait_for_all(module, size)
    define(module, "reduce_scatter_rows", 1, partial(_reduce_scatter, size, element, wait), exported=True)


@dataclass(frozen=True)
class _Round:
    """A round: at most `capacity` elements of each rank's, from the `position`-th on."""

    code: Code
    rank: Rank
    capacity: Int

    def start(self, rank: Int | int) -> Int:
        """Return the place at which a rank's part begins."""
        index = rank if isinstance(rank, Int) else self.code.integer(rank)
        return self.code.load_int(self.rank.get("starts") + index * _WORD)

    def count(self, rank: Int | int) -> Int:
        """Count the elements of a rank's part that this round is about."""
        left = self.start(rank + 1) - self.start(rank) - self.rank.get("position")
        return left.at_least(self.code.integer(0)).at_most(self.capacity)

    def first(self, rank: Int | int) -> Int:
        """Return the place of the first element of a rank's part that this round is about."""
        return self.start(rank) + self.rank.get("position")


def _run(
    code: Code,
    rank: Rank,
    capacity: Int,
    wait: ir.Function,
    write: Callable[[_Round], None],
    read: Callable[[_Round], None],
) -> None:
    """Emit all rounds, or as many as can be done before waiting is in vain: write the own slot, then read
    those of all."""
    arrived = code.stack(8)
    code.store_int(code.integer(1), arrived)

    def goes_on() -> ir.Value:
        left = rank.get("position").compare("<", rank.get("total"))
        return code.builder.and_(left, code.load_int(arrived).compare("==", 1))

    with code.loop_while(goes_on):
        it = _Round(code, rank, capacity)
        with code.when(rank.get("stage").compare("==", 0)):
            write(it)
            rank.announce(rank.get("phase"), 1)
        code.call(wait, rank.args, arrived)
        with code.when(code.load_int(arrived).compare("==", 1)):
            read(it)
            rank.finish_round(capacity)
    rank.set("done", code.load_int(arrived))


def _gather(size: int, wait: ir.Function, code: Code, args: Int) -> None:
    rank = Rank(code, args)
    own = rank.get("rank")

    def source() -> Int:
        return rank.get("x") + rank.get("position")

    def write(it: _Round) -> None:
        code.copy_bytes(source(), rank.slot(own, rank.get("phase")), it.count(own))

    def read(it: _Round) -> None:
        with code.loop(0, code.integer(size)) as other:
            slot = rank.slot(other, rank.get("phase"))
            term = source().if_else(other.compare("==", own), slot)
            code.copy_bytes(term, rank.get("output") + it.first(other), it.count(other))

    _run(code, rank, rank.get("slot_bytes"), wait, write, read)


def _reduce_scatter(size: int, element: Element, wait: ir.Function, code: Code, args: Int) -> None:
    rank = Rank(code, args)
    own = rank.get("rank")
    capacity = rank.get("slot_bytes") // (size * element.size * MAX_LANES) * MAX_LANES
    part_bytes = capacity * element.size

    def place(it: _Round, other: Int) -> Int:
        return rank.get("x") + it.first(other) * element.size

    def write(it: _Round) -> None:
        slot = rank.slot(own, rank.get("phase"))
        with code.loop(0, code.integer(size)) as other, code.when(other.compare("!=", own)):
            code.copy_bytes(place(it, other), slot + other * part_bytes, it.count(other) * element.size)

    def read(it: _Round) -> None:
        phase, mine = rank.get("phase"), place(it, own)
        terms = [
            mine.if_else(own.compare("==", other), rank.slot(other, phase) + own * part_bytes)
            for other in range(size)
        ]
        output = rank.get("output") + rank.get("position") * element.size
        add_terms(code, element, terms, [output], it.count(own))

    _run(code, rank, capacity, wait, write, read)
