"""Sums and concatenations over the ranks of one machine, through memory that all of them have mapped.

They run in phases of `nbengine.kernels.cpu.exchange`. A short tensor is summed in one phase: every rank reads
all of it from all ranks. A long one takes two, as a reduce-scatter and an all-gather: each rank sums one part
and reads the other sums (Thakur, Rabenseifner, Gropp, 2005). Either way an element is added in rank order, in
float32, and rounded once, so that all ranks get the same bits. Tensors longer than a slot take as many rounds
as they need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Element, Int, define
from nbengine.kernels.cpu.exchange import PART_MULTIPLE, Rank, add_terms, define_wait_for_all
from nbengine.kernels.cpu.jit import Function, compile_module


@dataclass(frozen=True)
class AllReduce:
    """The functions that sum, compiled for a number of ranks and a kind of element; see the module."""

    one_phase: Function
    two_phases: Function


@cache
def compile_all_reduce(size: int, element: Element) -> AllReduce:
    """Compile the functions that sum in place.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    return AllReduce(*compile_module(_define_all_reduce, ["one_phase", "two_phases"], size, element))


def _define_all_reduce(module: ir.Module, size: int, element: Element) -> None:
    wait = define_wait_for_all(module, size)
    define(module, "one_phase", 1, partial(_sum_in_one_phase, size, element, wait), exported=True)
    define(module, "two_phases", 1, partial(_sum_in_two_phases, size, element, wait), exported=True)


@cache
def compile_all_gather(size: int) -> Function:
    """Compile the function that concatenates rows of bytes.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define_all_gather, ["all_gather"], size)
    return function


def _define_all_gather(module: ir.Module, size: int) -> None:
    wait = define_wait_for_all(module, size)
    define(module, "all_gather", 1, partial(_gather, size, wait), exported=True)


@dataclass(frozen=True)
class _Round:
    """The data of a round: `count` elements of `size` bytes each, from the address `x` on."""

    rank: Rank
    code: Code
    x: Int
    count: Int
    element_size: int
    arrived: Int
    """The address of a flag that is 1, or 0 once waiting was in vain."""

    def when_stage(self, stage: int) -> AbstractContextManager[None]:
        """Begin the body of a stage that is not done yet."""
        return self.code.when(self.rank.get("stage").compare("==", stage))

    def when_all_arrived(self, wait: ir.Function) -> AbstractContextManager[None]:
        """Emit step 3, and begin the body of step 4."""
        self.code.call(wait, self.rank.args, self.arrived)
        return self.code.when(self.code.load_int(self.arrived).compare("==", 1))

    def write_slot(self) -> None:
        """Emit steps 1 and 2 with the data itself."""
        phase = self.rank.get("phase")
        slot = self.rank.slot(self.rank.get("rank"), phase)
        self.code.copy_bytes(self.x, slot, self.count * self.element_size)
        self.rank.announce(phase, 1)


@contextmanager
def _rounds(code: Code, args: Int, element_size: int) -> Iterator[_Round]:
    """Run the body, which does a round or as much of it as can be done, until all is done or waiting is in
    vain."""
    rank, arrived = Rank(code, args), code.stack(8)
    x, total, slot_bytes = rank.get("x"), rank.get("total"), rank.get("slot_bytes")
    code.store_int(code.integer(1), arrived)

    def goes_on() -> ir.Value:
        left = rank.get("position").compare("<", total)
        return code.builder.and_(left, code.load_int(arrived).compare("==", 1))

    with code.loop_while(goes_on):
        position = rank.get("position")
        count = (total - position).at_most(slot_bytes // element_size)
        yield _Round(rank, code, x + position * element_size, count, element_size, arrived)
    rank.set("done", code.load_int(arrived))


def _sum_in_one_phase(size: int, element: Element, wait: ir.Function, code: Code, args: Int) -> None:
    with _rounds(code, args, element.size) as it:
        with it.when_stage(0):
            it.write_slot()
        with it.when_all_arrived(wait):
            phase = it.rank.get("phase")
            terms = [it.rank.slot(rank, phase) for rank in range(size)]
            add_terms(code, element, terms, [it.x], it.count)
            it.rank.finish_round(it.count)


def _sum_in_two_phases(size: int, element: Element, wait: ir.Function, code: Code, args: Int) -> None:
    """Emit both phases. In the second a rank's slot holds the sum of its part; no part is written where no
    other rank reads it."""
    with _rounds(code, args, element.size) as it:
        own = it.rank.get("rank")
        part = (it.count + (size * PART_MULTIPLE - 1)) // (size * PART_MULTIPLE) * PART_MULTIPLE
        start = (own * part).at_most(it.count)
        count = (start + part).at_most(it.count) - start
        offset = start * element.size

        @contextmanager
        def other_parts() -> Iterator[tuple[Int, Int, Int]]:
            """Yield each other rank, the beginning of its part in bytes, and the part's size."""
            with code.loop(0, code.integer(size)) as rank, code.when(rank.compare("!=", own)):
                first = (rank * part).at_most(it.count)
                length = (first + part).at_most(it.count) - first
                yield rank, first * element.size, length * element.size

        with it.when_stage(0):
            phase = it.rank.get("phase")
            with other_parts() as (_, place, nbytes):
                code.copy_bytes(it.x + place, it.rank.slot(own, phase) + place, nbytes)
            it.rank.announce(phase, 1)
        with it.when_stage(1), it.when_all_arrived(wait):
            phase = it.rank.get("phase")
            mine = it.x + offset
            terms = [
                mine.if_else(own.compare("==", rank), it.rank.slot(rank, phase) + offset)
                for rank in range(size)
            ]
            add_terms(code, element, terms, [it.rank.slot(own, phase + 1) + offset, mine], count)
            it.rank.announce(phase + 1, 2)
        with it.when_stage(2), it.when_all_arrived(wait):
            phase = it.rank.get("phase")
            with other_parts() as (rank, place, nbytes):
                code.copy_bytes(it.rank.slot(rank, phase) + place, it.x + place, nbytes)
            it.rank.finish_round(it.count)


def _gather(size: int, wait: ir.Function, code: Code, args: Int) -> None:
    with _rounds(code, args, 1) as it:
        with it.when_stage(0):
            it.write_slot()
        with it.when_all_arrived(wait):
            phase, width, output = (it.rank.get(name) for name in ("phase", "width", "output"))
            start = it.rank.get("position")
            end = start + it.count
            with code.loop(start // width, (end + (width - 1)) // width) as row:
                first = (row * width).at_least(start)
                nbytes = ((row + 1) * width).at_most(end) - first
                with code.loop(0, code.integer(size)) as rank:
                    source = it.rank.slot(rank, phase) + (first - start)
                    target = output + (row * size + rank) * width + (first - row * width)
                    code.copy_bytes(source, target, nbytes)
            it.rank.finish_round(it.count)
