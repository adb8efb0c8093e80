"""Flags in shared memory, with which threads of several processes wait for each other.

A *flag* is a count that one thread raises (`announce`) and others wait for (`wait_for`), on cache lines of
its own.

The count is stored with release and loaded with acquire ordering: a thread that has seen it sees everything
that its owner wrote before. It also orders the owner's earlier *loads* before the store, so that memory which
the owner has read, and said so, may be written by those who have seen the count.

A waiter first looks again and again, then gives the processor away between two looks, and then sleeps. On
Linux it sleeps with `futex(2)` on the low half of the count, after adding itself to the flag's sleepers; the
owner wakes nobody while there are none. Dekker's rule keeps a wake-up from being lost: the sleeper adds
itself, fences, and looks at the count; the owner stores the count, fences, and looks at the sleepers. One of
the two must see the other, and if the count changes after the sleeper's last look the kernel does not let it
sleep. Elsewhere a waiter sleeps for `_PAUSE_MICROSECONDS` at a time.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass

import llvmlite.binding as llvm
from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, declare, define
from nbengine.kernels.cpu.futex import FUTEX_WAIT, FUTEX_WAKE, futex_number
from nbengine.kernels.cpu.jit import Function, compile_module

FLAG_BYTES = 128
"""The bytes from flag to flag: two cache lines, because processors fetch them in pairs."""

_SLEEPERS = 8  # offset of the number of sleepers
_ALL = 2**31 - 1
_NAPS = 4
_PAUSE_MICROSECONDS = 100
_PAUSES = 1000


class Patience(ctypes.Structure):
    """The way in which a thread waits: looks that only pause the processor, looks that give it away, and then
    naps of `nap_seconds` and `nap_nanoseconds`.

    `abort` is the address of an int64; when it is not 0 anymore, waiting is in vain and ends.
    """

    _fields_ = [
        ("spins", ctypes.c_int64),
        ("yields", ctypes.c_int64),
        ("abort", ctypes.c_int64),
        ("nap_seconds", ctypes.c_int64),
        ("nap_nanoseconds", ctypes.c_int64),
    ]


class FlagArguments(ctypes.Structure):
    """The flag to wait for or to raise: its address and the count. `done` is 1 when the wait was not in
    vain."""

    _fields_ = [
        ("patience", Patience),
        ("flag", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("done", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class FlagFunctions:
    """The functions `wait_for` and `announce`, compiled, each for the address of `FlagArguments`."""

    wait_for: Function
    announce: Function


@functools.cache
def compile_flags() -> FlagFunctions:
    """Compile the functions, once a process.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    return FlagFunctions(*compile_module(_define, ["wait_for", "announce"]))


def _define(module: ir.Module) -> None:
    wait = define_wait(module, "wait")

    def field(code: Code, args: Int, name: str) -> Int:
        return code.load_int(args + getattr(FlagArguments, name).offset)

    def wait_for(code: Code, args: Int) -> None:
        done = args + FlagArguments.done.offset
        code.call(
            wait,
            field(code, args, "flag"),
            field(code, args, "count"),
            args + FlagArguments.patience.offset,
            done,
        )

    def raise_flag(code: Code, args: Int) -> None:
        announce(code, field(code, args, "flag"), field(code, args, "count"))

    define(module, "wait_for", 1, wait_for, exported=True)
    define(module, "announce", 1, raise_flag, exported=True)


def available() -> bool:
    """Return whether this machine's memory and numbers are laid out as the flags need it."""
    return sys.byteorder == "little" and ctypes.sizeof(ctypes.c_void_p) == 8


def announce(code: Code, flag: Int, count: Int) -> None:
    """Raise a flag's count, and wake the threads that sleep until it is raised."""
    code.store_release(count, flag)
    number = futex_number()
    if number is None:
        return
    code.fence()
    with code.when(code.load_acquire(flag + _SLEEPERS).compare(">", 0)):
        _futex(code, number, flag, FUTEX_WAKE, code.integer(_ALL), code.integer(0))


def define_wait(module: ir.Module, name: str) -> ir.Function:
    """Define wait(flag, count, patience, result): wait for the flag's count to be `count` or more.

    It stores 1 at `result` when it is, and 0 if it is not after some naps or the group was aborted.
    """

    def body(code: Code, flag: Int, count: Int, patience: Int, result: Int) -> None:
        b = code.builder
        tries = code.stack(8)

        def behind() -> ir.Value:
            return code.load_acquire(flag).compare("<", count)

        def try_below(limit: Int) -> ir.Value:
            return b.and_(behind(), code.load_int(tries).compare("<", limit))

        def waits_on(limit: Int) -> ir.Value:
            abort = code.load_int(patience + Patience.abort.offset)
            return b.and_(try_below(limit), code.load_acquire(abort).compare("==", 0))

        def count_try() -> None:
            code.store_int(code.load_int(tries) + 1, tries)

        spins = code.load_int(patience + Patience.spins.offset)
        looks = spins + code.load_int(patience + Patience.yields.offset)
        code.store_int(code.integer(0), tries)
        with code.loop_while(lambda: try_below(spins)):
            pause(code)
            count_try()
        with code.loop_while(lambda: try_below(looks)):
            _call(code, "sched_yield")
            count_try()
        with code.when(behind()):
            code.store_int(code.integer(0), tries)
            number = futex_number()
            if number is None:
                with code.loop_while(lambda: waits_on(code.integer(_PAUSES))):
                    _call(code, "usleep", code.integer(_PAUSE_MICROSECONDS))
                    count_try()
            else:
                code.fetch_add(flag + _SLEEPERS, 1)
                code.fence()
                with code.loop_while(lambda: waits_on(code.integer(_NAPS))):
                    seen = code.load_acquire(flag)
                    # The kernel compares with the very value that was too low: read once more it could have
                    # changed, and the change would be slept through.
                    with code.when(seen.compare("<", count)):
                        nap = patience + Patience.nap_seconds.offset
                        _futex(code, number, flag, FUTEX_WAIT, seen, nap)
                    count_try()
                code.fetch_add(flag + _SLEEPERS, -1)
        code.store_int(Int(b, b.select(behind(), ir.IntType(64)(0), ir.IntType(64)(1))), result)

    return define(module, name, 4, body)


def _futex(code: Code, number: int, flag: Int, operation: int, value: Int, timeout: Int) -> None:
    constants = (code.integer(each) for each in (number, operation))
    call, operation_code = constants
    zero = code.integer(0)
    _call(code, "syscall", call, flag, operation_code, value, timeout, zero, zero)


def _call(code: Code, name: str, *arguments: Int) -> None:
    """Call a function of the C library; its address is found when the code is linked, so that all processes have
    the same code."""
    word = ir.IntType(64)
    function = declare(code.builder.module, name, ir.FunctionType(word, [word] * len(arguments)))
    code.builder.call(function, [argument.ir for argument in arguments])


def pause(code: Code) -> None:
    """Tell the processor that this is a loop that waits."""
    void, architecture = ir.VoidType(), llvm.get_process_triple().split("-")[0]
    if architecture == "x86_64":
        hint = declare(code.builder.module, "llvm.x86.sse2.pause", ir.FunctionType(void, ()))
        code.builder.call(hint, ())
    elif architecture in ("aarch64", "arm64"):
        word = ir.IntType(32)
        hint = declare(code.builder.module, "llvm.aarch64.hint", ir.FunctionType(void, (word,)))
        code.builder.call(hint, (word(1),))


@functools.cache
def address_of(name: str) -> int:
    """Return the address of a function of the C library in this process."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    return int(address or 0)
