"""The arithmetic on a token's row before attention over latents: its latent is normalised, and the numbers of its key and
of its queries that have a place are turned."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, partial

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Element, Int, define
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.row_functions import Row, rms_norm, turn_halves, turn_pairs
from nbengine.kernels.cpu.trials import compile_tried

_FLOAT, _WORD = 4, 8


class LatentRowArguments(ctypes.Structure):
    """The addresses, and the strides in bytes; the `items` are rows of float32.

    `projected` has a row's latent and its key's numbers, which go to `output`. `queries` has the heads', whose numbers
    with a place go to `absorbed`, behind a latent of each head. `angles` are those of all `positions`, int64.
    """

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("counter", "items", "rows", "queries", "query_stride", "projected", "projected_stride"),
                *("weight", "angles", "angle_stride", "positions"),
                *("absorbed", "absorbed_stride", "output", "output_stride"),
            )
        ),
        ("eps", ctypes.c_float),
    ]


@dataclass(frozen=True)
class LatentRowShape:
    """The numbers of a query of each of the `heads`: `plain` ones, and `turned` ones that have a place; and those of a
    latent, its `rank`. With `has_pairs` neighbours turn together, and else the halves."""

    heads: int
    plain: int
    turned: int
    rank: int
    has_pairs: bool


@cache
def compile_latent_rows(shape: LatentRowShape) -> Function:
    """Compile the function of `LatentRowArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.step_trials import try_latent_rows

    (function,), _ = compile_tried(_define, ["latent_rows"], lambda _: (shape,), try_latent_rows)
    return function


def _define(module: ir.Module, shape: LatentRowShape) -> None:
    define(module, "latent_rows", 1, partial(_latent_rows, shape), exported=True)


def _latent_rows(shape: LatentRowShape, code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(LatentRowArguments, name).offset)

    turn = partial(turn_pairs if shape.has_pairs else turn_halves, shape.turned)
    eps, rank_bytes = code.load(args + LatentRowArguments.eps.offset), shape.rank * _FLOAT
    query_bytes, key_bytes = (shape.plain + shape.turned) * _FLOAT, rank_bytes + shape.turned * _FLOAT
    with code.tickets(args + LatentRowArguments.counter.offset, get("items")) as number:
        position = code.load_int(get("positions") + number * _WORD)
        angles = get("angles") + position * get("angle_stride")
        queries = get("queries") + number * get("query_stride") + shape.plain * _FLOAT
        absorbed = get("absorbed") + number * get("absorbed_stride") + rank_bytes
        source = get("projected") + number * get("projected_stride")
        target = get("output") + number * get("output_stride")
        with code.loop(0, code.integer(shape.heads)) as head:
            query, key = queries + head * query_bytes, absorbed + head * key_bytes
            turn(Row(code, Element.FLOAT32, eps, query, angles, key))
        rms_norm(shape.rank, Row(code, Element.FLOAT32, eps, source, get("weight"), target))
        turn(Row(code, Element.FLOAT32, eps, source + rank_bytes, angles, target + rank_bytes))
