"""The choice of each token's experts on the CPU: the router's product, and its largest outcomes.

A row's outcome depends neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from llvmlite import ir
from torch import Tensor

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Element, Int, Vector, define
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.cpu.threads import select_runner
from nbengine.kernels.cpu.trials import compile_tried

_FLOAT, _WORD = 4, 8
TAKEN = -math.inf
"""The number in the place of a score that has been chosen, and of those that are not there."""
_ROWS = (4, 1)
"""The numbers of rows that are multiplied at a time."""


class ScoreArguments(ctypes.Structure):
    """The addresses, the strides in bytes, and counts: `items` rows of `columns` elements at `weight`, contiguous,
    are multiplied with `rows` rows of float32 at `x`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "rows", "columns", "x", "x_stride", "weight"),
            *("output", "output_stride"),
        )
    ]


class ChooseArguments(ctypes.Structure):
    """The addresses, the stride in bytes, and counts: the `items` are rows of `experts` scores, float32, with room
    for whole vectors of 16, which are overwritten.

    `weights` float32 and `chosen` int64 get `per_token` numbers a row. With `renormalize` not 0, a row's weights
    are divided by their sum; then they are multiplied by the chosen ones' numbers at `factors`, float32, unless that
    is 0.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "rows", "experts", "per_token", "renormalize", "scores", "stride"),
            *("weights", "chosen", "factors"),
        )
    ]


class CpuRouting:
    """The choice of experts, for one thread at a time, the one that calls torch."""

    def __init__(
        self, experts: int, per_token: int, *, renormalize: bool, factors: Tensor | None = None
    ) -> None:
        self.experts, self.per_token, self.renormalize = experts, per_token, renormalize
        self._factors = factors
        self._run = select_runner()

    @property
    def width(self) -> int:
        """Return the numbers of a row of scores, of which the experts' are the first."""
        return -(-self.experts // MAX_LANES) * MAX_LANES

    def scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x @ weight.T, [T, `width`], for x [T, columns] float32 and a dense weight [experts, columns] of
        another type; sums are float32."""
        x = x if x.stride(1) == 1 else x.contiguous()
        output = x.new_empty(len(x), self.width)
        arguments = ScoreArguments(
            items=self.experts,
            rows=len(x),
            columns=x.shape[1],
            x=x.data_ptr(),
            x_stride=x.stride(0) * _FLOAT,
            weight=weight.data_ptr(),
            output=output.data_ptr(),
            output_stride=output.stride(0) * _FLOAT,
        )
        self._call(compile_scores(ELEMENTS[weight.dtype]), arguments)
        return output

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [T, per_token], float32, of the experts with the largest scores, which are softmax of
        the scores [T, at least experts], times the experts' factors if there are any, and these experts, int64; of
        equals the first come first."""
        if scores.stride(0) != self.width:
            whole = scores.new_empty(len(scores), self.width)
            whole[:, : self.experts] = scores[:, : self.experts]
            scores = whole
        weights = scores.new_empty(len(scores), self.per_token)
        chosen = torch.empty(weights.shape, dtype=torch.int64)
        function, arguments = self.operation(scores, weights, chosen)
        arguments.items = len(scores)
        self._call(function, arguments)
        return weights, chosen

    def operation(self, scores: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Function, ctypes.Structure]:
        """Return the function that chooses, and its arguments but for the number of items, which are rows: `choose`
        with scores [T, `width`], that are overwritten, and memory for its outcome."""
        arguments = ChooseArguments(
            experts=self.experts,
            per_token=self.per_token,
            renormalize=int(self.renormalize),
            scores=scores.data_ptr(),
            stride=scores.stride(0) * _FLOAT,
            weights=weights.data_ptr(),
            chosen=chosen.data_ptr(),
            factors=0 if self._factors is None else self._factors.data_ptr(),
        )
        return compile_choose(), arguments

    def _call(self, function: Function, arguments: ctypes.Structure) -> None:
        self._run(function, ctypes.addressof(arguments), torch.get_num_threads())


@cache
def compile_scores(element: Element) -> Function:
    """Compile the function of `ScoreArguments` for a weight of such elements.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.step_trials import try_scores

    (function,), _ = compile_tried(_define_scores, ["scores"], lambda _: (element,), try_scores)
    return function


def _define_scores(module: ir.Module, element: Element) -> None:
    define(module, "scores", 1, partial(_scores, element), exported=True)


@cache
def compile_choose() -> Function:
    """Compile the function of `ChooseArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define_choose, ["choose"])
    return function


def _define_choose(module: ir.Module) -> None:
    define(module, "choose", 1, _choose, exported=True)


def _scores(element: Element, code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(ScoreArguments, name).offset)

    rows, columns, position = get("rows"), get("columns"), code.stack(_WORD)
    with code.tickets(args + ScoreArguments.counter.offset, get("items")) as expert:
        weight = get("weight") + expert * columns * element.size
        code.store_int(code.integer(0), position)
        for count in _ROWS:

            def fits(count: int = count) -> ir.Value:
                return (rows - code.load_int(position)).compare(">=", count)

            with code.loop_while(fits):
                row = code.load_int(position)
                x = [get("x") + (row + number) * get("x_stride") for number in range(count)]
                sums = [code.accumulator(code.constant(0.0, MAX_LANES)) for _ in range(count)]
                with code.loop(0, columns, MAX_LANES) as column:
                    factor = code.load(weight + column * element.size, MAX_LANES, element)
                    for source, total in zip(x, sums, strict=True):
                        total.set(
                            factor.times_plus(code.load(source + column * _FLOAT, MAX_LANES), total.get())
                        )
                for number, total in enumerate(sums):
                    target = get("output") + (row + number) * get("output_stride") + expert * _FLOAT
                    code.store(total.get().reduce(Vector.__add__), target)
                code.store_int(row + count, position)


@dataclass(frozen=True)
class Scores:
    """A row of scores."""

    code: Code
    row: Int
    experts: Int

    def over(self, body: Callable[[Int, Vector], None]) -> None:
        """Emit `body(address, numbers)` for all vectors; numbers behind the last score are `TAKEN`."""
        with self.code.loop(0, self.experts, MAX_LANES) as first:
            numbers = self.code.load(self.row + first * _FLOAT, MAX_LANES)
            body(
                self.row + first * _FLOAT,
                self.code.mask_from(numbers, first, self.experts, TAKEN),
            )

    def largest(self) -> Vector:
        """Return the largest number that is one."""
        peak = self.code.accumulator(self.code.constant(TAKEN, MAX_LANES))
        self.over(lambda _, numbers: peak.set(numbers.at_least(peak.get())))
        return peak.get().reduce(Vector.at_least)

    def place_of(self, number: Vector, place: Int) -> Int:
        """Return the first place of a number, the last one if it is nowhere; `place` is one on the stack."""
        code = self.code
        code.store_int(code.integer(0), place)

        def is_elsewhere() -> ir.Value:
            b, here = code.builder, code.load_int(place)
            found = code.load(self.row + here * _FLOAT)
            differs = b.extract_element(
                b.fcmp_unordered("!=", found.ir, number.ir), ir.Constant(ir.IntType(32), 0)
            )
            return b.and_(differs, (here + 1).compare("<", self.experts))

        with code.loop_while(is_elsewhere):
            code.store_int(code.load_int(place) + 1, place)
        return code.load_int(place)


def _choose(code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(ChooseArguments, name).offset)

    experts, per_token, place = get("experts"), get("per_token"), code.stack(_WORD)
    with code.tickets(args + ChooseArguments.counter.offset, get("items")) as number:
        scores = Scores(code, get("scores") + number * get("stride"), experts)
        weights = get("weights") + number * per_token * _FLOAT
        chosen = get("chosen") + number * per_token * _WORD
        peak = scores.largest()
        sums = code.accumulator(code.constant(0.0, MAX_LANES))
        scores.over(lambda _, numbers: sums.set(sums.get() + power(code, numbers, peak)))
        total = sums.get().reduce(Vector.__add__)
        kept = code.accumulator(code.constant(0.0))
        with code.loop(0, per_token) as nth:
            best = scores.largest()
            found = scores.place_of(best, place)
            weight = power(code, best, peak) / total
            kept.set(kept.get() + weight)
            code.store(weight, weights + nth * _FLOAT)
            code.store_int(found, chosen + nth * _WORD)
            code.store(code.constant(TAKEN), scores.row + found * _FLOAT)
        with code.when(get("renormalize").compare("!=", 0)), code.loop(0, per_token) as nth:
            at = weights + nth * _FLOAT
            code.store(code.load(at) / kept.get(), at)
        factors = get("factors")
        with code.when(factors.compare("!=", 0)), code.loop(0, per_token) as nth:
            at, found = weights + nth * _FLOAT, code.load_int(chosen + nth * _WORD)
            code.store(code.load(at) * code.load(factors + found * _FLOAT), at)


def power(code: Code, numbers: Vector, peak: Vector) -> Vector:
    """Return the exponential function of how far numbers are from the largest."""
    lanes = numbers.lanes
    return code.exp2((numbers - peak.splat(lanes)) * code.constant(math.log2(math.e), lanes))
