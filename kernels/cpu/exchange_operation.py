"""An exchange between ranks as an operation of a program: one thread exchanges, the others wait for it."""

from __future__ import annotations

import ctypes
from functools import cache

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.exchange import ExchangeArguments
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.cpu.program import STOPPED_AT


class ExchangeOperation(ctypes.Structure):
    """The arguments: addresses and counts; `items` is 1.

    The function at `short`, or that at `long` for more than `most` elements, is called with the `ExchangeArguments`
    at `exchange` for `rows` rows of `row` elements at `x`; `output` and `width` are theirs. `function` becomes the
    one that was called.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "rows", "exchange", "x", "row", "output", "width"),
            *("short", "long", "most", "function"),
        )
    ]


@cache
def compile_exchange() -> Function:
    """Compile the function of `ExchangeOperation`, which stops its program when waiting was in vain.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define, ["exchange"])
    return function


def _define(module: ir.Module) -> None:
    define(module, "exchange", 1, _exchange, exported=True)


def _exchange(code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(ExchangeOperation, name).offset)

    with code.tickets(args + ExchangeOperation.counter.offset, get("items")):
        exchange, total, zero = get("exchange"), get("rows") * get("row"), code.integer(0)
        for name, value in (
            ("x", get("x")),
            ("total", total),
            ("position", zero),
            ("stage", zero),
            ("output", get("output")),
            ("width", get("width")),
        ):
            code.store_int(value, exchange + getattr(ExchangeArguments, name).offset)
        function = get("short").if_else(total.compare("<=", get("most")), get("long"))
        code.store_int(function, args + ExchangeOperation.function.offset)
        code.call_address(function, exchange)
        with code.when(code.load_int(exchange + ExchangeArguments.done.offset).compare("==", 0)):
            code.store_int(code.integer(1), args + 8 * STOPPED_AT)
