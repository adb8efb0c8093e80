"""Sums and concatenations over the ranks of one machine, through memory that all of them have mapped.

Every rank has a flag (`nbengine.kernels.cpu_flags`) and two slots. What the ranks exchange is cut into *phases*, numbered
from 1 alike on all ranks. In phase p a rank

1. writes its slot number p % 2,
2. raises its flag to p,
3. waits until every rank's flag is p or more,
4. reads all ranks' slots number p % 2.

Two slots are enough, and there is no second barrier: a rank writes the slot of phase p + 2 after step 3 of phase p + 1. By then every
other rank has raised its flag to p + 1, which it did after step 4 of phase p: nobody reads that slot any more. Release
and acquire order the copies with the flags in both directions.

A short tensor is summed in one phase: every rank reads all of it from all ranks. A long one takes two, as a reduce-scatter and an all-gather: each
rank sums one part and reads the other sums (Thakur, Rabenseifner, Gropp, 2005). Either way an element is added in rank order, in float32, and rounded once, so
that all ranks get the same bits. Tensors longer than a slot take as many rounds as they need.

The functions return when they are done or have waited for some time without avail; called again, they go on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial, reduce

from llvmlite import ir

from nbengine.kernels.cpu_flags import FLAG_BYTES, Patience, announce, define_wait
from nbengine.kernels.cpu_ir import MAX_LANES, Code, Element, Int, Vector, define
from nbengine.kernels.cpu_jit import Function, compile_module

SLOTS = 2

_UNROLL = 4
_PART_MULTIPLE = MAX_LANES * _UNROLL


class ExchangeArguments(ctypes.Structure):
    """A rank's place in the shared memory, and what it exchanges at present.

    `flags` and `slots` are addresses of rank 0's; `phase` is the number of the next or current phase. `x`
    is the address of the data of `total` elements (all_reduce) or bytes (all_gather), of which `position` are
    done; `stage` is how many flags of the current round have been raised. all_gather writes to
    `output`, of whose rows each rank has `width` bytes. `done` is 1 when everything is done.
    """

    _fields_ = [
        ("patience", Patience),
        ("flags", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("phase", ctypes.c_int64),
        ("x", ctypes.c_int64),
        ("total", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("stage", ctypes.c_int64),
        ("output", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("done", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class AllReduce:
    """Compiled for a number of ranks and a kind of element; see the module."""

    one_phase: Function
    two_phases: Function


@cache
def compile_all_reduce(size: int, element: Element) -> AllReduce:
    """Sum in place.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    module = ir.Module("nbengine_all_reduce")
    wait = _define_wait_for_all(module, size)
    define(module, "one_phase", 1, partial(_sum_in_one_phase, size, element, wait), exported=True)
    define(module, "two_phases", 1, partial(_sum_in_two_phases, size, element, wait), exported=True)
    return AllReduce(*compile_module(module, "one_phase", "two_phases"))


@cache
def compile_all_gather(size: int) -> Function:
    """Concatenate rows of bytes.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    module = ir.Module("nbengine_all_gather")
    wait = _define_wait_for_all(module, size)
    define(module, "all_gather", 1, partial(_gather, size, wait), exported=True)
    (function,) = compile_module(module, "all_gather")
    return function


@dataclass(frozen=True)
class _Rank:
    """A rank's arguments, and what follows from them."""

    code: Code
    args: Int

    def get(self, field: str) -> Int:
        return self.code.load_int(self.args + getattr(ExchangeArguments, field).offset)

    def set(self, field: str, value: Int | int) -> None:
        value = value if isinstance(value, Int) else self.code.integer(value)
        self.code.store_int(value, self.args + getattr(ExchangeArguments, field).offset)

    def slot(self, rank: Int | int, phase: Int) -> Int:
        """Address of a rank's slot of a phase."""
        index = rank * SLOTS if isinstance(rank, Int) else self.code.integer(rank * SLOTS)
        return self.get("slots") + (index + phase % SLOTS) * self.get("slot_bytes")

    def announce(self, phase: Int, stage: int) -> None:
        """Step 2 of a phase, after which it is the current one."""
        self.set("phase", phase)
        announce(self.code, self.get("flags") + self.get("rank") * FLAG_BYTES, phase)
        self.set("stage", stage)

    def finish_round(self, count: Int) -> None:
        """Step 4 is done, and so is the next part of the data."""
        self.set("phase", self.get("phase") + 1)
        self.set("stage", 0)
        self.set("position", self.get("position") + count)


@dataclass(frozen=True)
class _Round:
    """What a round is about: `count` elements of `size` bytes each, from the address `x` on."""

    rank: _Rank
    code: Code
    x: Int
    count: Int
    element_size: int
    arrived: Int
    """Address of 1, or 0 once waiting was in vain."""

    def when_stage(self, stage: int) -> AbstractContextManager[None]:
        """The body of a stage that is not done yet."""
        return self.code.when(self.rank.get("stage").compare("==", stage))

    def when_all_arrived(self, wait: ir.Function) -> AbstractContextManager[None]:
        """Step 3, and the body of step 4."""
        self.code.call(wait, self.rank.args, self.arrived)
        return self.code.when(self.code.load_int(self.arrived).compare("==", 1))

    def write_slot(self) -> None:
        """Steps 1 and 2 with the data itself."""
        phase = self.rank.get("phase")
        slot = self.rank.slot(self.rank.get("rank"), phase)
        self.code.copy_bytes(self.x, slot, self.count * self.element_size)
        self.rank.announce(phase, 1)


def _define_wait_for_all(module: ir.Module, size: int) -> ir.Function:
    """wait_for_all(args, arrived): step 3; stores 1 at `arrived` if all ranks have come to the current phase, else 0."""
    wait = define_wait(module, "wait")

    def body(code: Code, args: Int, arrived: Int) -> None:
        rank = _Rank(code, args)
        flags, phase = rank.get("flags"), rank.get("phase")
        code.store_int(code.integer(1), arrived)
        with (
            code.loop(0, code.integer(size)) as other,
            code.when(code.load_int(arrived).compare("==", 1)),
        ):
            patience = args + ExchangeArguments.patience.offset
            code.call(wait, flags + other * FLAG_BYTES, phase, patience, arrived)

    return define(module, "wait_for_all", 2, body)


@contextmanager
def _rounds(code: Code, args: Int, element_size: int) -> Iterator[_Round]:
    """Run the body, which does a round or as much of it as can be done, until all is done or waiting is in vain."""
    rank, arrived = _Rank(code, args), code.stack(8)
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
            _add(code, element, terms, [it.x], it.count)
            it.rank.finish_round(it.count)


def _sum_in_two_phases(size: int, element: Element, wait: ir.Function, code: Code, args: Int) -> None:
    """In the second phase a rank's slot holds the sum of its part; no part is written where nobody else reads it."""
    with _rounds(code, args, element.size) as it:
        own = it.rank.get("rank")
        part = (it.count + (size * _PART_MULTIPLE - 1)) // (size * _PART_MULTIPLE) * _PART_MULTIPLE
        start = (own * part).at_most(it.count)
        count = (start + part).at_most(it.count) - start
        offset = start * element.size

        @contextmanager
        def other_parts() -> Iterator[tuple[Int, Int, Int]]:
            """Each other rank, where its part begins in bytes, and its size."""
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
            _add(code, element, terms, [it.rank.slot(own, phase + 1) + offset, mine], count)
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


def _add(code: Code, element: Element, terms: list[Int], targets: list[Int], count: Int) -> None:
    """Store the sums of `count` elements at the addresses `terms`, added in this order in float32, at all targets."""

    def add(lanes: int, offset: Int) -> None:
        first, *rest = (code.load(term + offset, lanes, element) for term in terms)
        total = reduce(Vector.__add__, rest, first)
        for target in targets:
            code.store(total, target + offset, element)

    unrolled = count // _PART_MULTIPLE * _PART_MULTIPLE
    whole = count // MAX_LANES * MAX_LANES
    with code.loop(0, unrolled, _PART_MULTIPLE) as i:
        for step in range(_UNROLL):
            add(MAX_LANES, (i + step * MAX_LANES) * element.size)
    with code.loop(unrolled, whole, MAX_LANES) as i:
        add(MAX_LANES, i * element.size)
    with code.loop(whole, count) as i:
        add(1, i * element.size)
