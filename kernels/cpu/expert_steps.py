"""The way of tokens through quantised experts, in operations of a program.

A token's rounded row is copied to each of its experts, whose rows lie together (`compile_sort`, `compile_spread`).
The experts that have rows are multiplied one after the other with the functions of single products, each with
arguments of its own (`compile_each`): the threads go from one to the next without meeting. Then each token's
outcomes are added (`compile_combine`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Int, define
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.cpu.products import GatedArguments, ProductArguments
from nbengine.kernels.cpu.threads import select_runner
from nbengine.kernels.cpu.trials import compile_tried

EXPERT_WORDS = 16
"""Words (int64) of an expert's arguments of a product."""
_FLOAT, _WORD = 4, 8


class SortArguments(ctypes.Structure):
    """The addresses, the strides in bytes, and counts; there is one item.

    The tokens are `rows` with `per_token` experts each at `chosen`, int64; `numbers` (0: the same) has the number
    of each among the `experts` that are here, `experts` itself for one that is not. `places`, of the shape of
    `chosen`, gets the row that each of them has among all, those of an expert being neighbours; it is `nowhere` for
    an expert that is not here. `starts` [experts + 1] is for this function alone.

    `active` gets the numbers of experts that have rows, and `count` how many there are. Their `GatedArguments` at
    `gates` and `ProductArguments` at `downs`, 16 words each, get their part of the rows of records, of gated
    records and of outputs.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "rows", "per_token", "experts", "chosen", "numbers", "places", "nowhere"),
            *("starts", "active", "count", "gates", "downs"),
            "memory",
        )
    ]


class ExpertMemory(ctypes.Structure):
    """The addresses and strides in bytes of the rows that `SortArguments` divides, at its `memory`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (*("records", "record_stride", "gated", "gated_stride", "outputs", "output_stride"),)
    ]


class SpreadArguments(ctypes.Structure):
    """The addresses, the strides in bytes, and counts: the `items` are tokens, whose `records` are copied to the
    `per_token` rows of `output` that are at `places`, but for those that are `nowhere`. The rows of `output` have
    nothing between them."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "rows", "per_token", "places", "nowhere", "records", "record_stride"),
            *("output", "output_stride"),
        )
    ]


class EachArguments(ctypes.Structure):
    """The addresses of the arguments, 16 words each, of a `function`, and of those numbers of them with which it is
    called: `count` is the address of how many `active` are. Every thread calls it with all of them."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("counter", "items", "function", "arguments", "active", "count")
    ]


class CombineArguments(ctypes.Structure):
    """The addresses, the strides in bytes, and counts: the `items` are tokens, each of which gets the sum of
    `per_token` rows of `outputs`, which are at `places`, times its `weights`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "rows", "per_token", "weights", "places", "outputs", "output_stride"),
            *("sums", "sum_stride"),
        )
    ]


class CpuCombine:
    """The sum of each token's outcomes, rows of `size` float32, for one thread at a time, the one that calls
    torch."""

    def __init__(self, size: int) -> None:
        self._function = compile_combine(size)
        self._run = select_runner()

    def __call__(self, weights: Tensor, outputs: Tensor, places: Tensor) -> Tensor:
        """Return the sums [T, size] of rows of outputs [N, size], float32: those at places [T, n], int64, times
        weights [T, n], float32, added in this order; all are contiguous."""
        tokens, per_token = weights.shape
        sums = outputs.new_empty(tokens, outputs.shape[1])
        arguments = CombineArguments(
            items=tokens,
            per_token=per_token,
            weights=weights.data_ptr(),
            places=places.data_ptr(),
            outputs=outputs.data_ptr(),
            output_stride=outputs.stride(0) * _FLOAT,
            sums=sums.data_ptr(),
            sum_stride=sums.stride(0) * _FLOAT,
        )
        self._run(self._function, ctypes.addressof(arguments), torch.get_num_threads())
        return sums


@cache
def compile_sort() -> Function:
    """Compile the function of `SortArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    return compile_module(_define_sort, ["sort"])[0]


@cache
def compile_spread() -> Function:
    """Compile the function of `SpreadArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    return compile_module(_define_spread, ["spread"])[0]


@cache
def compile_each() -> Function:
    """Compile the function of `EachArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    return compile_module(_define_each, ["each"])[0]


@cache
def compile_combine(size: int) -> Function:
    """Compile the function of `CombineArguments` for rows of `size` numbers, a multiple of 16.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.step_trials import try_combine

    (function,), _ = compile_tried(_define_combine, ["combine"], lambda _: (size,), try_combine)
    return function


def _define_sort(module: ir.Module) -> None:
    define(module, "sort", 1, _sort, exported=True)


def _define_spread(module: ir.Module) -> None:
    define(module, "spread", 1, _spread, exported=True)


def _define_each(module: ir.Module) -> None:
    define(module, "each", 1, _each, exported=True)


def _define_combine(module: ir.Module, size: int) -> None:
    define(module, "combine", 1, partial(_combine, size), exported=True)


class _Arguments:
    """The arguments of a function by name."""

    def __init__(self, code: Code, address: Int, kind: type[ctypes.Structure]) -> None:
        self._code, self._address, self._kind = code, address, kind

    def __getitem__(self, name: str) -> Int:
        return self._code.load_int(self._address + getattr(self._kind, name).offset)


def _sort(code: Code, args: Int) -> None:
    get = _Arguments(code, args, SortArguments)
    with code.tickets(args, get["items"]):
        experts, starts, total = get["experts"], get["starts"], get["rows"] * get["per_token"]

        def start_of(expert: Int) -> Int:
            return starts + expert * _WORD

        def number_of(place: Int) -> Int:
            """Emit the number of a token's expert among those that are here; return where it is."""
            number = code.load_int(get["chosen"] + place * _WORD)
            code.store_int(number, here)
            with code.when(get["numbers"].compare("!=", 0)):
                code.store_int(code.load_int(get["numbers"] + number * _WORD), here)
            return code.load_int(here)

        here = code.stack(_WORD)
        with code.loop(0, experts + 1) as expert:
            code.store_int(code.integer(0), start_of(expert))
        with code.loop(0, total) as place:
            at = start_of(number_of(place))
            code.store_int(code.load_int(at) + 1, at)
        _divide(code, get, start_of)
        with code.loop(0, total) as place:
            number = number_of(place)
            at, target = start_of(number), get["places"] + place * _WORD
            code.store_int(code.load_int(at), target)
            code.store_int(code.load_int(at) + 1, at)
            with code.when(number.compare("==", experts)):
                code.store_int(get["nowhere"], target)


def _divide(code: Code, get: _Arguments, start_of: Callable[[Int], Int]) -> None:
    """Give each expert its part of the rows, and list those that have any; counts of rows become their starts."""
    memory = _Arguments(code, get["memory"], ExpertMemory)
    first, active = code.stack(_WORD), code.stack(_WORD)
    code.store_int(code.integer(0), first)
    code.store_int(code.integer(0), active)
    with code.loop(0, get["experts"]) as expert:
        rows, start = code.load_int(start_of(expert)), code.load_int(first)
        code.store_int(start, start_of(expert))
        code.store_int(start + rows, first)
        with code.when(rows.compare(">", 0)):
            nth = code.load_int(active)
            code.store_int(expert, get["active"] + nth * _WORD)
            code.store_int(nth + 1, active)
            records = memory["records"] + start * memory["record_stride"]
            gated = memory["gated"] + start * memory["gated_stride"]
            outputs = memory["outputs"] + start * memory["output_stride"]
            own = expert * (EXPERT_WORDS * _WORD)
            for kind, base, source, target in (
                (GatedArguments, get["gates"], records, gated),
                (ProductArguments, get["downs"], gated, outputs),
            ):
                values = {"counter": code.integer(0), "rows": rows, "records": source, "output": target}
                for name, value in values.items():
                    code.store_int(value, base + own + getattr(kind, name).offset)
    code.store_int(code.load_int(active), get["count"])


def _spread(code: Code, args: Int) -> None:
    get = _Arguments(code, args, SpreadArguments)
    with code.tickets(args, get["items"]) as token, code.loop(0, get["per_token"]) as nth:
        place = code.load_int(get["places"] + (token * get["per_token"] + nth) * _WORD)
        with code.when(place.compare("!=", get["nowhere"])):
            source, target = token * get["record_stride"], place * get["output_stride"]
            code.copy_bytes(get["records"] + source, get["output"] + target, get["output_stride"])


def _each(code: Code, args: Int) -> None:
    get = _Arguments(code, args, EachArguments)
    with code.loop(0, code.load_int(get["count"])) as nth:
        number = code.load_int(get["active"] + nth * _WORD)
        code.call_address(get["function"], get["arguments"] + number * (EXPERT_WORDS * _WORD))


def _combine(size: int, code: Code, args: Int) -> None:
    get = _Arguments(code, args, CombineArguments)
    per_token = get["per_token"]
    with code.tickets(args, get["items"]) as token:
        weights, places = (
            get["weights"] + token * per_token * _FLOAT,
            get["places"] + token * per_token * _WORD,
        )
        target = get["sums"] + token * get["sum_stride"]
        with code.loop(0, code.integer(size * _FLOAT), MAX_LANES * _FLOAT) as column:
            total = code.accumulator(code.constant(0.0, MAX_LANES))
            with code.loop(0, per_token) as nth:
                row = get["outputs"] + code.load_int(places + nth * _WORD) * get["output_stride"]
                weight = code.load(weights + nth * _FLOAT).splat(MAX_LANES)
                total.set(weight.times_plus(code.load(row + column, MAX_LANES), total.get()))
            code.store(total.get(), target + column)
