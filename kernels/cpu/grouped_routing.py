"""The choice of each token's experts among the best groups of them on the CPU (DeepSeek-AI, 2024, DeepSeek-V3).

A row's outcome depends neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, partial

from llvmlite import ir
from torch import Tensor

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Int, Vector, define
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.cpu.routing import TAKEN, CpuRouting, Scores, power
from nbengine.kernels.cpu.vectors import sigmoid

LEAST_SUM = 1e-20
"""The number that is added to the sum of weights before they are divided."""
_FLOAT, _WORD = 4, 8


class GroupedArguments(ctypes.Structure):
    """The addresses, the stride in bytes, and counts: the `items` are rows of `experts` scores, float32, behind which
    there is room for as many again, both in whole vectors of 16, and for a number for each group.

    `correction`, float32, has a number for each expert. `weights` float32 and `chosen` int64 get `per_token` numbers a
    row. With `renormalize` not 0, a row's weights are divided by their sum; then they are multiplied by `factor`.
    """

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("counter", "items", "rows", "experts", "per_token", "renormalize", "scores", "stride"),
                *("weights", "chosen", "correction", "groups", "chosen_groups"),
            )
        ),
        ("factor", ctypes.c_float),
    ]


@dataclass(frozen=True)
class GroupedChoice:
    """The kind of choice that a function makes: an expert's score is the sigmoid of its logit, or else softmax; with
    `has_correction` a number is added to it that does nothing but choose; and only some groups are chosen from."""

    is_sigmoid: bool
    has_correction: bool
    has_groups: bool


class CpuGroupedRouting(CpuRouting):
    """The choice of experts among the best `chosen_groups` of `groups`, for one thread at a time.

    A group is as good as its best expert; with a `correction`, float32 [experts], as its best two together.
    """

    def __init__(
        self,
        experts: int,
        per_token: int,
        *,
        renormalize: bool,
        is_sigmoid: bool,
        correction: Tensor | None = None,
        groups: int = 1,
        chosen_groups: int = 1,
        factor: float = 1.0,
    ) -> None:
        super().__init__(experts, per_token, renormalize=renormalize)
        self._groups, self._chosen_groups = groups, chosen_groups
        self._correction, self._factor = correction, factor
        self._choice = GroupedChoice(is_sigmoid, correction is not None, chosen_groups < groups)

    @property
    def width(self) -> int:
        """Return the numbers of a row of scores, of which the experts' are the first."""
        groups = self._groups if self._choice.has_groups else 0
        return 2 * super().width + -(-groups // MAX_LANES) * MAX_LANES

    def operation(self, scores: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Function, ctypes.Structure]:
        """See `CpuRouting.operation`."""
        arguments = GroupedArguments(
            experts=self.experts,
            per_token=self.per_token,
            renormalize=int(self.renormalize),
            scores=scores.data_ptr(),
            stride=scores.stride(0) * _FLOAT,
            weights=weights.data_ptr(),
            chosen=chosen.data_ptr(),
            correction=0 if self._correction is None else self._correction.data_ptr(),
            groups=self._groups,
            chosen_groups=self._chosen_groups,
            factor=self._factor,
        )
        return compile_grouped(self._choice), arguments


@cache
def compile_grouped(choice: GroupedChoice) -> Function:
    """Compile a function of `GroupedArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define_grouped, ["choose"], choice)
    return function


def _define_grouped(module: ir.Module, choice: GroupedChoice) -> None:
    define(module, "choose", 1, partial(_choose, choice), exported=True)


def _choose(choice: GroupedChoice, code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(GroupedArguments, name).offset)

    experts, per_token = get("experts"), get("per_token")
    padded = (experts + (MAX_LANES - 1)) // MAX_LANES * MAX_LANES
    factor = code.load(args + GroupedArguments.factor.offset)
    place = code.stack(_WORD)
    with code.tickets(args + GroupedArguments.counter.offset, get("items")) as number:
        row = get("scores") + number * get("stride")
        rule = _Rule(code, choice, Scores(code, row, experts), row + padded * _FLOAT)
        rule.rank(get("correction"))
        if choice.has_groups:
            rule.leave_groups_out(row + padded * (2 * _FLOAT), get("groups"), get("chosen_groups"))
        better = Scores(code, rule.ranks, experts)
        weights = get("weights") + number * per_token * _FLOAT
        kept = code.accumulator(code.constant(0.0))
        with code.loop(0, per_token) as nth:
            found = better.place_of(better.largest(), place)
            weight = rule.score(code.load(row + found * _FLOAT))
            kept.set(kept.get() + weight)
            code.store(weight, weights + nth * _FLOAT)
            code.store_int(found, get("chosen") + (number * per_token + nth) * _WORD)
            code.store(code.constant(TAKEN), better.row + found * _FLOAT)
        with code.when(get("renormalize").compare("!=", 0)), code.loop(0, per_token) as nth:
            at = weights + nth * _FLOAT
            code.store(code.load(at) / (kept.get() + code.constant(LEAST_SUM)), at)
        with code.loop(0, per_token) as nth:
            at = weights + nth * _FLOAT
            code.store(code.load(at) * factor, at)


class _Rule:
    """The scores of a row's experts, and at `ranks` the numbers that choose."""

    def __init__(self, code: Code, choice: GroupedChoice, logits: Scores, ranks: Int) -> None:
        self.ranks = ranks
        self._code, self._choice, self._logits = code, choice, logits
        if choice.is_sigmoid:
            return
        self._peak = logits.largest()
        sums = code.accumulator(code.constant(0.0, MAX_LANES))
        logits.over(lambda _, numbers: sums.set(sums.get() + power(code, numbers, self._peak)))
        self._total = sums.get().reduce(Vector.__add__)

    def score(self, logits: Vector) -> Vector:
        """Return the scores of logits."""
        if self._choice.is_sigmoid:
            return sigmoid(self._code, logits)
        return power(self._code, logits, self._peak) / self._total.splat(logits.lanes)

    def rank(self, correction: Int) -> None:
        """Write what chooses: scores with their correction. Without one it is logits, which have the order of scores
        and still differ where scores are rounded to one."""
        code, experts = self._code, self._logits.experts
        with code.loop(0, experts, MAX_LANES) as first:
            numbers = code.load(self._logits.row + first * _FLOAT, MAX_LANES)
            better = self.score(numbers) if self._choice.has_correction else numbers
            code.store(better, self.ranks + first * _FLOAT)
        if self._choice.has_correction:
            with code.loop(0, experts) as expert:
                at = self.ranks + expert * _FLOAT
                code.store(code.load(at) + code.load(correction + expert * _FLOAT), at)

    def leave_groups_out(self, scores: Int, groups: Int, chosen: Int) -> None:
        """Take the experts of groups that are not chosen for taken; of equal groups the first are chosen. `scores`
        is the address of the groups' own."""
        code = self._code
        size = self._logits.experts // groups
        with code.loop(0, groups) as group:
            code.store(self._score_of_group(group * size, size), scores + group * _FLOAT)
        before = code.stack(_WORD)
        with code.loop(0, groups) as group:
            own = code.load(scores + group * _FLOAT)
            code.store_int(code.integer(0), before)
            with code.loop(0, groups) as other:
                theirs = code.load(scores + other * _FLOAT)
                is_first = code.builder.and_(_holds(code, "==", theirs, own), other.compare("<", group))
                with code.when(code.builder.or_(_holds(code, ">", theirs, own), is_first)):
                    code.store_int(code.load_int(before) + 1, before)
            with code.when(code.load_int(before).compare(">=", chosen)), code.loop(0, size) as expert:
                code.store(code.constant(TAKEN), self.ranks + (group * size + expert) * _FLOAT)

    def _score_of_group(self, first: Int, size: Int) -> Vector:
        """Return the largest of `size` numbers that choose, with a correction the sum of the largest two."""
        code = self._code
        best, second = (code.accumulator(code.constant(TAKEN)) for _ in range(2))
        with code.loop(0, size) as expert:
            number = code.load(self.ranks + (first + expert) * _FLOAT)
            second.set(number.at_most(best.get()).at_least(second.get()))
            best.set(number.at_least(best.get()))
        if not self._choice.has_correction:
            return best.get()
        with code.when(size.compare("==", 1)):
            second.set(code.constant(0.0))
        return best.get() + second.get()


def _holds(code: Code, operator: str, one: Vector, other: Vector) -> ir.Value:
    """Make a condition of two numbers, which does not hold where one of them is NaN."""
    found = code.builder.fcmp_ordered(operator, one.ir, other.ir)
    return code.builder.extract_element(found, ir.Constant(ir.IntType(32), 0))
