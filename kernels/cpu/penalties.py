"""Penalties on the CPU: one pass over the tokens that occurred, on one thread.

There is too little work to wake other threads for it, and torch would take a dozen passes.
"""

from __future__ import annotations

import ctypes
from functools import cache

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.jit import Function, compile_module


class PenaltyArguments(ctypes.Structure):
    """The addresses of contiguous arrays of the penalty table; `stride` is the width of its lists."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("lengths", ctypes.c_int64),
        ("index", ctypes.c_int64),
        ("factors", ctypes.c_int64),
        ("deductions", ctypes.c_int64),
        ("logits", ctypes.c_int64),
        ("shifts", ctypes.c_int64),
        ("counts", ctypes.c_int64),
        ("parameters", ctypes.c_int64),
        ("places", ctypes.c_int64),
    ]


class CpuPenalties:
    """The work that `nbengine.sampling.penalties.PenaltyTable` does each step, given the fields of
    `PenaltyArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """

    def __init__(self) -> None:
        self._apply, self._append = _compile()

    def apply(self, **arguments: int) -> None:
        """Change the logits of each row's tokens; a row's logits are shifted by its entry of `shifts`."""
        packed = PenaltyArguments(**arguments)
        self._apply.call(ctypes.addressof(packed))

    def append(self, **arguments: int) -> None:
        """Count each row's entry of `places` once more, and list it where it is new."""
        packed = PenaltyArguments(**arguments)
        self._append.call(ctypes.addressof(packed))


@cache
def _compile() -> tuple[Function, Function]:
    apply, append = compile_module(_define, ["apply", "append"])
    return apply, append


def _define(module: ir.Module) -> None:
    define(module, "apply", 1, _apply, exported=True)
    define(module, "append", 1, _append, exported=True)


def _argument(code: Code, args: Int, field: str) -> Int:
    return code.load_int(args + getattr(PenaltyArguments, field).offset)


def _apply(code: Code, args: Int) -> None:
    rows, stride, lengths, index, factors, deductions, logits, shifts = (
        _argument(code, args, name)
        for name in ("rows", "stride", "lengths", "index", "factors", "deductions", "logits", "shifts")
    )
    zero = code.constant(0)
    with code.loop(0, _argument(code, args, "count")) as i:
        row, shift = code.load_int(rows + i * 8), code.load_int(shifts + i * 8)
        first = row * stride
        with code.loop(first, first + code.load_int(lengths + row * 8)) as entry:
            place = logits + (code.load_int(index + entry * 8) + shift) * 4
            x, factor = code.load(place), code.load(factors + entry * 4)
            positive = x.at_least(zero)
            changed = positive / factor + (x - positive) * factor
            code.store(changed - code.load(deductions + entry * 4), place)


def _append(code: Code, args: Int) -> None:
    rows, stride, lengths, index, factors, deductions, counts, parameters, places = (
        _argument(code, args, name)
        for name in (
            "rows",
            "stride",
            "lengths",
            "index",
            "factors",
            "deductions",
            "counts",
            "parameters",
            "places",
        )
    )
    found = code.stack(8)
    with code.loop(0, _argument(code, args, "count")) as i:
        row, place = code.load_int(rows + i * 8), code.load_int(places + i * 8)
        first = row * stride
        length = code.load_int(lengths + row * 8)
        end = first + length
        code.store_int(end, found)
        with code.loop(first, end) as entry, code.when(code.load_int(index + entry * 8).compare("==", place)):
            code.store_int(entry, found)
        entry = code.load_int(found)
        repetition, frequency, presence = (code.load(parameters + row * 12 + 4 * k) for k in range(3))
        with code.when(entry.compare("==", end)):
            code.store_int(length + 1, lengths + row * 8)
            code.store_int(place, index + entry * 8)
            code.store(code.constant(0), counts + entry * 4)
        count = code.load(counts + entry * 4) + code.constant(1)
        code.store(count, counts + entry * 4)
        code.store(repetition, factors + entry * 4)
        code.store(count * frequency + presence, deductions + entry * 4)
