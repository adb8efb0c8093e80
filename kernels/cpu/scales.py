"""The scales of an int8 cache in the attention kernel: they are applied to scores and weights, once a token, and
keys and values are multiplied as the whole numbers that they are."""

from __future__ import annotations

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.layout import FLOAT, AttentionShape


def scale_at(shape: AttentionShape, block: Int, token: Int) -> Int:
    """Return the place of a token's scale in the block at `block`, which holds it."""
    assert shape.scales_at is not None
    return block + token % shape.block_size * FLOAT + shape.scales_at


def define_scale_weights(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define scale_weights(weights, values, table, stride, start, end, visible), for the weights of one row:

    weights[t - start] *= scale of value(t) for start <= t < visible, and 0 for visible <= t < end, in whole vectors
    of tokens. value(t) is in the block at values + table[t // block_size] * stride. A weight that is 0 as the row
    does not see the token stays 0 where the scale is NaN. With a span there is one more argument, the first token
    that the row sees.
    """
    block, lanes = shape.block_size, shape.lanes

    def body(
        code: Code,
        weights: Int,
        values: Int,
        table: Int,
        stride: Int,
        start: Int,
        end: Int,
        visible: Int,
        first_seen: Int | None = None,
    ) -> None:
        with code.loop(start, end, lanes) as token:
            here = values + code.load_int(table + token // block * 4, 4) * stride
            place = weights + (token - start) * FLOAT
            scaled = code.load(place, lanes) * code.load(scale_at(shape, here, token), lanes)
            seen = code.mask_from(scaled, token, visible, 0.0)
            if first_seen is not None:
                seen = code.mask_before(seen, token, first_seen, 0.0)
            code.store(seen, place)

    return define(module, f"{name}_scale_weights", 8 if shape.features.span else 7, body)
