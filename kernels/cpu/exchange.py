"""The order of writes and reads in which ranks of one machine exchange data through memory that all of them
have mapped.

Every rank has a flag (`nbengine.kernels.cpu.flags`) and two slots. The exchanged data is cut into *phases*,
numbered from 1 alike on all ranks. In phase p a rank

1. writes its slot number p % 2,
2. raises its flag to p,
3. waits until every rank's flag is p or more,
4. reads all ranks' slots number p % 2.

Two slots are enough, and there is no second barrier: a rank writes the slot of phase p + 2 after step 3 of
phase p + 1. By then every other rank has raised its flag to p + 1, which it did after step 4 of phase p:
nobody reads that slot any more. Release and acquire order the copies with the flags in both directions.

The functions return when they are done or have waited for some time without avail; called again, they go on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import reduce

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Element, Int, Vector, define
from nbengine.kernels.cpu.flags import FLAG_BYTES, Patience, announce, define_wait

SLOTS = 2

_UNROLL = 4
PART_MULTIPLE = MAX_LANES * _UNROLL


class ExchangeArguments(ctypes.Structure):
    """A rank's place in the shared memory, and the data that it exchanges at present.

    `flags` and `slots` are the addresses of rank 0's; `phase` is the number of the next or current phase. `x`
    is the address of the data of `total` elements (all_reduce) or bytes (all_gather), of which `position` are
    done; `stage` counts the flags of the current round that have been raised. all_gather writes to `output`,
    of whose rows each rank has `width` bytes. `starts` is the address of the size + 1 places at which the
    ranks' parts of rows begin and the last one ends. `done` is 1 when everything is done.
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
        ("starts", ctypes.c_int64),
        ("done", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class Rank:
    """A rank's arguments, and the values that follow from them."""

    code: Code
    args: Int

    def get(self, field: str) -> Int:
        return self.code.load_int(self.args + getattr(ExchangeArguments, field).offset)

    def set(self, field: str, value: Int | int) -> None:
        value = value if isinstance(value, Int) else self.code.integer(value)
        self.code.store_int(value, self.args + getattr(ExchangeArguments, field).offset)

    def slot(self, rank: Int | int, phase: Int) -> Int:
        """Return the address of a rank's slot of a phase."""
        index = rank * SLOTS if isinstance(rank, Int) else self.code.integer(rank * SLOTS)
        return self.get("slots") + (index + phase % SLOTS) * self.get("slot_bytes")

    def announce(self, phase: Int, stage: int) -> None:
        """Emit step 2 of a phase, after which it is the current one."""
        self.set("phase", phase)
        announce(self.code, self.get("flags") + self.get("rank") * FLAG_BYTES, phase)
        self.set("stage", stage)

    def finish_round(self, count: Int) -> None:
        """Go on to the next part of the data, after step 4."""
        self.set("phase", self.get("phase") + 1)
        self.set("stage", 0)
        self.set("position", self.get("position") + count)


def define_wait_for_all(module: ir.Module, size: int) -> ir.Function:
    """Define wait_for_all(args, arrived): step 3, which stores 1 at `arrived` if all ranks have come to the
    phase, else 0."""
    wait = define_wait(module, "wait")

    def body(code: Code, args: Int, arrived: Int) -> None:
        rank = Rank(code, args)
        flags, phase = rank.get("flags"), rank.get("phase")
        code.store_int(code.integer(1), arrived)
        with (
            code.loop(0, code.integer(size)) as other,
            code.when(code.load_int(arrived).compare("==", 1)),
        ):
            patience = args + ExchangeArguments.patience.offset
            code.call(wait, flags + other * FLAG_BYTES, phase, patience, arrived)

    return define(module, "wait_for_all", 2, body)


def add_terms(code: Code, element: Element, terms: list[Int], targets: list[Int], count: Int) -> None:
    """Store the sums of `count` elements at the addresses `terms`, added in this order in float32, at all
    targets."""

    def add(lanes: int, offset: Int) -> None:
        first, *rest = (code.load(term + offset, lanes, element) for term in terms)
        total = reduce(Vector.__add__, rest, first)
        for target in targets:
            code.store(total, target + offset, element)

    unrolled = count // PART_MULTIPLE * PART_MULTIPLE
    whole = count // MAX_LANES * MAX_LANES
    with code.loop(0, unrolled, PART_MULTIPLE) as i:
        for step in range(_UNROLL):
            add(MAX_LANES, (i + step * MAX_LANES) * element.size)
    with code.loop(unrolled, whole, MAX_LANES) as i:
        add(MAX_LANES, i * element.size)
    with code.loop(whole, count) as i:
        add(1, i * element.size)
