"""The beginning of a prepared step: it takes in what differs from step to step, and cuts attention into items.

It does for requests of one token each what `nbengine.kernels.cpu.plan.decode_work` does, inside a program, where
twenty calls of numpy would take as long as the products of a layer. Layers of each rule have a plan of their own.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial

from llvmlite import ir

from nbengine.kernels.cpu.attention_rule import first_seen
from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.cpu.layout import DECODE_PART, AttentionArguments, Span, Work

_INT, _WORD = 4, 8
WORK_BYTES = len(Work) * _INT
"""The bytes of an item of the work list."""


class DecodePlanArguments(ctypes.Structure):
    """The addresses, the stride in bytes, and counts.

    `ids` (0: none), `positions` and `slots`, int64, are those of the step's `rows` tokens; they are copied to `own`,
    three arrays of `capacity` int64, where other operations find them. `seq_lens`, int32, are those of the
    `decodes` requests of one token, which come first. Their work list goes to `work`, and what attention has to
    know of it to the `layers` arguments whose addresses are at `attends`, of which the first one says how large the
    window or a chunk is.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "counter",
            "items",
            "rows",
            "decodes",
            "capacity",
            "kv_heads",
            "ids",
            "positions",
            "slots",
            "seq_lens",
            "block_table",
            "block_table_stride",
            "own",
            "work",
            "attends",
            "layers",
        )
    ]


@cache
def compile_decode_plan(span: Span | None) -> Function:
    """Compile the function of `DecodePlanArguments` for layers of a rule; it has one item.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define, ["decode_plan"], span)
    return function


def _define(module: ir.Module, span: Span | None) -> None:
    define(module, "decode_plan", 1, partial(_decode_plan, span), exported=True)


def _decode_plan(span: Span | None, code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(DecodePlanArguments, name).offset)

    with code.tickets(args + DecodePlanArguments.counter.offset, get("items")):
        num_bytes, own, each = get("rows") * _WORD, get("own"), get("capacity") * _WORD
        with code.when(get("ids").compare("!=", 0)):
            code.copy_bytes(get("ids"), own, num_bytes)
        code.copy_bytes(get("positions"), own + each, num_bytes)
        code.copy_bytes(get("slots"), own + each * 2, num_bytes)
        rule = None
        if span is not None:
            rule = span, code.load_int(code.load_int(get("attends")) + AttentionArguments.span.offset)
        items = _write_work(code, get("decodes"), get("seq_lens"), get("work"), rule) * get("kv_heads")
        with code.loop(0, get("layers")) as layer:
            attend = code.load_int(get("attends") + layer * _WORD)
            for name, value in (
                ("items", items),
                ("block_table", get("block_table")),
                ("block_table_stride", get("block_table_stride")),
            ):
                code.store_int(value, attend + getattr(AttentionArguments, name).offset)


def _write_work(code: Code, rows: Int, seq_lens: Int, work: Int, rule: tuple[Span, Int] | None) -> Int:
    """Write the work list of layers with a span of some size, or without one; return the number of its items."""
    total = code.stack(_WORD)
    code.store_int(code.integer(0), total)
    with code.loop(0, rows) as row:
        tokens = code.load_int(seq_lens + row * _INT, _INT)
        parts = (tokens + (DECODE_PART - 1)) // DECODE_PART
        passed = None
        if rule is not None:
            passed = first_seen(code, *rule, tokens) // DECODE_PART
            parts = parts - passed
        first = code.load_int(total)
        with code.loop(0, parts) as part:
            start = (part if passed is None else part + passed) * DECODE_PART
            values = {
                Work.REQUEST: row,
                Work.FIRST_TOKEN: row,
                Work.TOKENS: code.integer(1),
                Work.VISIBLE: tokens,
                Work.KV_START: start,
                Work.KV_END: (start + DECODE_PART).at_most(tokens),
                Work.TASK: row,
                Work.PART: part,
                Work.PARTS: parts,
                Work.PARTIAL: first,
            }
            item = work + (first + part) * WORK_BYTES
            for column, value in values.items():
                code.store_int(value, item + column * _INT, _INT)
        code.store_int(first + parts, total)
    return code.load_int(total)
