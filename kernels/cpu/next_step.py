"""The passage from one prepared step to the next within a program: each request goes on with its token.

It does for requests of one token each what the worker does between two steps, where Python and numpy, whose code and
data the weights have driven out of the caches, would take a fifth of the time of a small model's step.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.doubles import Double
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.draw_parameters import DRAW_ROW, place_of

_INT, _WORD = 4, 8
_GAMMA, _MIXES = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The numbers of SplitMix64; see `nbengine.sampling.random_streams`."""
TABLE_WORDS = 4
"""Words (int64) that say where the KV blocks of a cache group are."""


class NextStepArguments(ctypes.Structure):
    """The addresses and counts; numbers are int64 where nothing else is said.

    `chosen` has the token of each of the `rows`, negative where there is none. No further step begins if some row has none,
    or one of its `num_ends` numbers at `ends` [rows, num_ends], or if the number at `stop` is not 0: the word at
    `stopped` becomes 1 then. Otherwise the tokens go to `taken` and to `ids`, and `positions`, slots and
    lengths become those of the next step; `ended_at` gets the seconds and nanoseconds of CLOCK_REALTIME, from the function
    `clock`, which is `clock_gettime`. Each of `groups` has four words at `tables`: the address of its block table
    (int32), the bytes from row to row, and the addresses of its slots and its lengths (int32). A block has `1 << shift`
    tokens. With `draws`, each row has a `DRAW_ROW` there, which gets the next random number of its stream. The counters of the `operations`, each `operation_bytes` after the one before, become 0.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "rows"),
            *("chosen", "ends", "num_ends", "stop", "stopped", "taken"),
            *("ids", "positions", "groups", "tables", "shift"),
            *("counters", "operations", "operation_bytes", "draws", "clock", "ended_at"),
        )
    ]


@cache
def compile_next_step() -> Function:
    """Compile the function of `NextStepArguments`; it has one item.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define, ["next_step"])
    return function


def _define(module: ir.Module) -> None:
    define(module, "next_step", 1, _next_step, exported=True)


def _next_step(code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(NextStepArguments, name).offset)

    with code.tickets(args + NextStepArguments.counter.offset, get("items")):
        ends_here = code.stack(_WORD)
        code.store_int(code.load_int(get("stop")), ends_here)
        with code.loop(0, get("rows")) as row:
            token = code.load_int(get("chosen") + row * _WORD)
            with code.when(token.compare("<", 0)):
                code.store_int(code.integer(1), ends_here)
            with code.loop(0, get("num_ends")) as place:
                end = code.load_int(get("ends") + (row * get("num_ends") + place) * _WORD)
                with code.when(token.compare("==", end)):
                    code.store_int(code.integer(1), ends_here)
        goes_on = code.load_int(ends_here).compare("==", 0)
        with code.builder.if_else(goes_on) as (then, otherwise):
            with then:
                _go_on(code, get)
            with otherwise:
                code.store_int(code.integer(1), get("stopped"))


def _go_on(code: Code, get: Callable[[str], Int]) -> None:
    """Lay out the next step."""
    code.call_address(get("clock"), code.integer(time.CLOCK_REALTIME), get("ended_at"))
    shift = get("shift").ir
    with code.loop(0, get("rows")) as row:
        at = row * _WORD
        token = code.load_int(get("chosen") + at)
        code.store_int(token, get("taken") + at)
        code.store_int(token, get("ids") + at)
        position = code.load_int(get("positions") + at) + 1
        code.store_int(position, get("positions") + at)
        column = Int(code.builder, code.builder.lshr(position.ir, shift))
        offset = position - Int(code.builder, code.builder.shl(column.ir, shift))
        with code.loop(0, get("groups")) as group:
            table = get("tables") + group * (TABLE_WORDS * _WORD)
            blocks = code.load_int(table) + row * code.load_int(table + _WORD)
            block = code.load_int(blocks + column * _INT, _INT)
            slot = Int(code.builder, code.builder.shl(block.ir, shift)) + offset
            code.store_int(slot, code.load_int(table + 2 * _WORD) + at)
            # Groups may share their lengths.
            code.store_int(position + 1, code.load_int(table + 3 * _WORD) + row * _INT, _INT)
        with code.when(get("draws").compare("!=", 0)):
            _draw_next(code, get("draws") + row * DRAW_ROW.itemsize)
    with code.loop(0, get("operations")) as operation:
        code.store_int(code.integer(0), get("counters") + operation * get("operation_bytes"))


def _draw_next(code: Code, row: Int) -> None:
    """Go on to the next random number of a row: `nbengine.sampling.random_streams.uniforms`."""
    b, word = code.builder, ir.IntType(64)
    number = code.load_int(row + place_of("number")) + 1
    code.store_int(number, row + place_of("number"))
    x = b.mul((number + 1).ir, word(_GAMMA))
    x = b.add(x, code.load_int(row + place_of("stream")).ir)
    for shift, factor in _MIXES:
        x = b.mul(b.xor(x, b.lshr(x, word(shift))), word(factor))
    x = b.lshr(b.xor(x, b.lshr(x, word(31))), word(12))
    uniform = b.fmul(b.uitofp(x, ir.DoubleType()), ir.DoubleType()(2.0**-52))
    Double(b, uniform).store(row + place_of("uniform"))
