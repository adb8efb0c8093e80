"""A call of a compiled function in a process of its own, which alone ends if the function is an illegal one, or does not
come to its end.

The process shares this one's memory, as one between `vfork` and `exec` does, and the calling thread waits for its
end: that takes a fraction of a millisecond, where to copy a process that has loaded torch takes ten.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Callable
from functools import cache

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.flags import address_of
from nbengine.kernels.cpu.jit import Function, compile_module

_SHARE_MEMORY, _WAIT_FOR_ITS_END = 0x100, 0x4000
"""`CLONE_VM` and `CLONE_VFORK`."""
_NO_SIGNAL_AT_ITS_END = 0x40000000
"""`__WALL`, to wait for a process that is no ordinary child: nobody else waits for it, and no SIGCHLD comes of it."""
_STACK_BYTES = 1 << 20
_FATAL = (
    *(signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP),
    signal.SIGVTALRM,  # The time is over.
)
_SECONDS = 10
"""Processor time that a function may take; a trial takes milliseconds, and a busy machine does not count."""


class _AloneArguments(ctypes.Structure):
    """The function and its argument, the addresses of `signal`, `setitimer` and `_exit`, the time that a timer repeats
    itself after and that it ends at, each in seconds and millionths of them, and whether the function has returned."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("function", "argument", "signal", "setitimer", "exit"),
            *("again", "again_millionths", "limit", "limit_millionths"),
            "done",
        )
    ]


def returns_alone(function: Function, arguments: ctypes.Structure, seconds: float = _SECONDS) -> bool:
    """Call a function in a process of its own; return whether it returned, within some seconds of processor time. Where
    there is no such process, it is called here."""
    clone = _clone()
    if clone is None:
        function.call(ctypes.addressof(arguments))
        return True
    own = _AloneArguments(
        function=function.address,
        argument=ctypes.addressof(arguments),
        signal=address_of("signal"),
        setitimer=address_of("setitimer"),
        exit=address_of("_exit"),
        limit=int(seconds),
        limit_millionths=int(seconds % 1 * 1e6),
    )
    with mmap.mmap(-1, _STACK_BYTES) as stack:
        top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + _STACK_BYTES
        # A signal to all processes of a terminal, or of a group, is for those that stay.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - set(_FATAL))
        try:
            flags = _SHARE_MEMORY | _WAIT_FOR_ITS_END
            child = clone(_compiled().address, top, flags, ctypes.addressof(own))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if child < 0:
            function.call(ctypes.addressof(arguments))
            return True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, _NO_SIGNAL_AT_ITS_END)
    return bool(own.done)


@cache
def _clone() -> Callable[[int, int, int, int], int] | None:
    """Return the C library's `clone`, if there is one."""
    found = getattr(ctypes.CDLL(None), "clone", None) if sys.platform == "linux" else None
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        found.restype = ctypes.c_int
    return found


@cache
def _compiled() -> Function:
    (function,) = compile_module(_define, ["call_alone"])
    return function


def _define(module: ir.Module) -> None:
    define(module, "call_alone", 1, _call_alone, exported=True)


def _call_alone(code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(_AloneArguments, name).offset)

    # Left to the system, these signals would write the memory to a file, and older kernels end all who share it.
    for number in _FATAL:
        code.call_address(get("signal"), code.integer(int(number)), get("exit"))
    timer, nothing = code.integer(int(signal.ITIMER_VIRTUAL)), code.integer(0)
    code.call_address(get("setitimer"), timer, args + _AloneArguments.again.offset, nothing)
    code.call_address(get("function"), get("argument"))
    code.store_int(code.integer(1), args + _AloneArguments.done.offset)
