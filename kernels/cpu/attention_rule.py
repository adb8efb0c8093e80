"""The parts of the attention kernel that a layer has compiled in where its options want them: a window or chunks, a
soft cap, sinks. Plain attention has the code of none of them."""

from __future__ import annotations

from nbengine.kernels.cpu.codegen import Code, Int, Vector
from nbengine.kernels.cpu.layout import FLOAT, AttentionArguments, AttentionShape, Span
from nbengine.kernels.cpu.vectors import tanh


def first_seen(code: Code, span: Span, size: Int, seen: Int) -> Int:
    """Return the first token that a query sees that is the last one of `seen` tokens; `size` is that of the window
    or of a chunk."""
    if span is Span.WINDOW:
        return (seen - size).at_least(code.integer(0))
    return (seen - 1) // size * size


def first_seen_by(code: Code, shape: AttentionShape, arguments: Int, seen: Int) -> Int:
    """Return `first_seen` with the size in a kernel's arguments; for a kernel compiled with a span."""
    assert shape.features.span is not None
    size = code.load_int(arguments + AttentionArguments.span.offset)
    return first_seen(code, shape.features.span, size, seen)


def capped(code: Code, arguments: Int, scores: Vector) -> Vector:
    """Return scores, which lack the factor of the soft cap, as capped scores in base 2."""
    cap = code.load(arguments + AttentionArguments.soft_cap.offset)
    return tanh(code, scores) * cap.splat(scores.lanes)


def sinks_of(code: Code, shape: AttentionShape, arguments: Int, kv_head: Int) -> Int:
    """Return the place of the sinks of a KV head's group."""
    return code.load_int(arguments + AttentionArguments.sinks.offset) + kv_head * (shape.group * FLOAT)
