"""A program: operations that one team of threads runs one after the other, in a single call.

Every operation is a kernel that draws its work from a counter, which is the first word of its arguments. After
each, the threads meet: a thread counts itself as arrived, and waits until all have. Between two operations that
takes a microsecond, where a call from Python takes five.

An operation that waits for another process may give up for now: it stops the program. The threads leave, Python
finishes the operation, and the program goes on behind it. In a program that is finished by nobody, an operation that
stops it ends the run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from llvmlite import ir
from numpy.typing import NDArray

from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.flags import address_of, pause
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.cpu.threads import address_of_team_size, select_runner

WORDS = 32
"""Words (int64) that an operation's arguments may take."""
STOPPED_AT = WORDS
"""The place of the word behind an operation's arguments that is 1 when it has stopped the program, else 0."""
_ROW = WORDS + 8
T = TypeVar("T", bound=ctypes.Structure)
_SPINS = 4000
"""Looks at the others' arrival before the processor is given away between two looks: other processes may want
it."""


class _ProgramArguments(ctypes.Structure):
    """The addresses of the operations (each a function and its arguments), of the number of arrivals, of `sched_yield`,
    and of what tells the number of threads: constants in the code would keep it from being used by another process.
    `stopped` is the number of the operation that has stopped the program, or -1."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("operations", "count", "team_size", "arrivals", "give_away", "stopped")
    ]


class Operations:
    """Some operations of a program: `table` [n, 2] int64, the addresses of functions and arguments."""

    __slots__ = ("address", "count", "table")

    def __init__(self, table: NDArray[np.int64]) -> None:
        self.table = table
        # numpy takes long to say where an array is, which no step has to wait for.
        self.address: int = table.ctypes.data
        self.count = len(table)

    def behind(self, place: int) -> Operations:
        """Return what follows the operation at a place of the table."""
        return Operations(self.table[place + 1 :])


class Program:
    """Operations, each a function with its arguments; for one thread at a time, the one that calls torch.

    `arguments` [operations, words] int64 are their arguments, which may be changed between two runs. A run takes
    some of them, in their order: `some`. Where operations may stop the program, `finish` is called with the address
    of the arguments of one that has, and returns when the program can go on.
    """

    def __init__(
        self,
        operations: Sequence[tuple[Function, ctypes.Structure]],
        finish: Callable[[int], None] | None = None,
    ) -> None:
        self.arguments: NDArray[np.int64] = np.zeros((len(operations), _ROW), np.int64)
        for row, (_, values) in zip(self.arguments, operations, strict=True):
            row[:WORDS] = words_of(values)
        places = self.arguments.ctypes.data + 8 * _ROW * np.arange(len(operations))
        addresses = [function.address for function, _ in operations]
        self.addresses: NDArray[np.int64] = places
        """The addresses of the operations' arguments, [operations]."""
        self._table = np.stack((np.array(addresses, np.int64), places), axis=1)
        # The number of arrivals has cache lines of its own.
        self._arrivals: NDArray[np.int64] = np.zeros(WORDS, np.int64)
        self._own = _ProgramArguments(
            arrivals=self._arrivals.ctypes.data,
            give_away=address_of("sched_yield"),
            team_size=address_of_team_size(),
        )
        self._address = ctypes.addressof(self._own)
        self._function = _compile_program()
        self._run = select_runner()
        self._finish = finish

    def view(self, operation: int, kind: type[T]) -> T:
        """Return an operation's arguments, of the type that they had, in place."""
        return kind.from_address(int(self.addresses[operation]))

    def some(self, operations: Sequence[int]) -> Operations:
        """Return operations, given by their numbers, for `run`."""
        return Operations(np.ascontiguousarray(self._table[list(operations)]))

    def run(self, operations: Operations) -> int:
        """Run operations on torch's threads, and return the place of the one that has ended the run, or their
        number; raises what `finish` raises."""
        own, threads = self._own, torch.get_num_threads()
        self.arguments[:, 0] = 0
        while True:
            own.operations, own.count, own.stopped = operations.address, operations.count, -1
            self._arrivals[0] = 0
            self._run(self._function, self._address, threads)
            if own.stopped < 0:
                return operations.count
            stopped = int(operations.table[own.stopped, 1])
            ctypes.c_int64.from_address(stopped + 8 * STOPPED_AT).value = 0
            if self._finish is None:
                return int(own.stopped)
            self._finish(stopped)
            operations = operations.behind(own.stopped)


def words_of(values: ctypes.Structure, count: int = WORDS) -> NDArray[np.int64]:
    """Return arguments as `count` words, padded with zeros."""
    return np.frombuffer(bytes(values).ljust(8 * count, b"\0"), np.int64)


@cache
def _compile_program() -> Function:
    (function,) = compile_module(_define, ["program"])
    return function


def _define(module: ir.Module) -> None:
    define(module, "program", 1, _program, exported=True)


def _program(code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(_ProgramArguments, name).offset)

    operations, count, team_size, arrivals, give_away = (
        get(name) for name in ("operations", "count", "team_size", "arrivals", "give_away")
    )
    team, spins, position = code.stack(8), code.stack(8), code.stack(8)
    code.store_int(code.integer(1), team)
    # Who waits for more threads than there are waits forever.
    with code.when(team_size.compare("!=", 0)):
        code.store_int(code.call_for_number(team_size), team)
    threads = code.load_int(team)
    code.store_int(code.integer(0), position)
    with code.loop_while(lambda: code.load_int(position).compare("<", count)):
        number = code.load_int(position)
        operation = operations + number * 16
        arguments = code.load_int(operation + 8)
        code.call_address(code.load_int(operation), arguments)
        code.fetch_add(arrivals, 1)
        code.store_int(code.integer(0), spins)
        code.store_int(number + 1, position)
        all_arrived = (number + 1) * threads

        def waits(all_arrived: Int = all_arrived) -> ir.Value:
            return code.load_acquire(arrivals).compare("<", all_arrived)

        with code.loop_while(waits):
            pause(code)
            code.store_int(code.load_int(spins) + 1, spins)
            with code.when(code.load_int(spins).compare(">", _SPINS)):
                code.call_address(give_away)
        # The word is the operation's own: one that is already at the next operation does not change it.
        with code.when(code.load_int(arguments + 8 * STOPPED_AT).compare("!=", 0)):
            code.store_int(number, args + _ProgramArguments.stopped.offset)
            code.store_int(count, position)


def places_of(kind: type[ctypes.Structure]) -> dict[str, int]:
    """Return the place of each argument among an operation's words."""
    return {name: getattr(kind, name).offset // 8 for name, *_ in kind._fields_}
