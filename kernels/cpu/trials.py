"""A kernel whose instructions depend on the processor is tried before it is used: once a machine it runs on a small
input, and its results are compared with the reference's.

Where they differ, or the run ends by a signal, the kernel is compiled again without the newest of the instruction
sets, until it is right. The verdict is kept with the code (`nbengine.kernels.cpu.jit`), so that later processes of
this machine, and the ranks of an engine, make the same choice without a trial.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TypeAlias, TypeVarTuple

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from torch import Tensor

from nbengine.errors import NBEngineError
from nbengine.kernels.cpu.alone import returns_alone
from nbengine.kernels.cpu.jit import Function, Processor, compile_if_right, host_processor

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")
Call: TypeAlias = tuple[Function, ctypes.Structure]
"""A function and what it is called with."""
Trial: TypeAlias = Generator[Sequence[Call], None, bool]
"""A trial yields once, the calls that are to be made then, and returns whether their results are right."""

_LADDER = (
    ("AMX", ("amx",)),
    ("VNNI and products of bfloat16", ("avx512vnni", "avx512bf16", "avxvnni")),
    ("AVX-512", ("avx512", "avx10", "evex512")),
    # Without fused multiply-adds sums would have other bits than those of kernels that kept them.
    ("AVX2", ("avx2", "bmi", "vaes", "vpclmul", "gfni")),
    ("i8mm and bf16", ("i8mm", "bf16")),
    ("dotprod", ("dotprod",)),
    ("SVE", ("sve", "sme")),
)
"""The instruction sets in the order in which kernels do without them, with the beginnings of their names."""


def compile_tried(
    build: Callable[[ir.Module, *Ts], None],
    names: Sequence[str],
    choose: Callable[[Processor], tuple[*Ts]],
    trial: Callable[[Sequence[Function], *Ts], Trial],
) -> tuple[list[Function], tuple[*Ts]]:
    """Compile a module as `compile_module` does, with the arguments that `choose` gives for the processor, or, if they
    fail the trial, for one with fewer instruction sets; return the functions and these arguments.

    Raises:
        NBEngineError: LLVM has no code generator for this processor, or the functions are wrong with whatever it has.
    """
    host = host_processor()
    for processor, lacking in without_instructions(host):
        arguments = choose(processor)
        is_right = partial(_passes, trial, arguments)
        functions = compile_if_right(processor, build, names, is_right, *arguments)
        if functions is not None:
            if lacking:
                logger.warning(
                    "on this processor (%s) the kernel %s computes wrongly: it does without %s",
                    *(host.name, names[0], ", ".join(lacking)),
                )
            return functions, arguments
    raise NBEngineError(
        f"the kernel {names[0]} computes wrongly on this processor ({host.name}) with whatever instructions it has; "
        "to have it tried again, remove the directory `kernels` of nbengine's cache"
    )


def without_instructions(host: Processor) -> list[tuple[Processor, list[str]]]:
    """List the processor and what it is without one and more of its instruction sets, with the names of these."""
    found: list[tuple[Processor, list[str]]] = [(host, [])]
    for name, beginnings in _LADDER:
        best, lacking = found[-1]
        kept = {each: has and not each.startswith(beginnings) for each, has in best.features.items()}
        if kept != dict(best.features):
            found.append((Processor(host.name, llvm.FeatureMap(kept)), [*lacking, name]))
    return found


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory for the results of a trial, each byte of which is 255: no number."""
    return torch.full((*shape, dtype.itemsize), 255, dtype=torch.uint8).view(dtype)[..., 0]


def random_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return numbers of the normal distribution, always the same ones."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def is_near(found: Tensor, expected: Tensor, error: Tensor | float) -> bool:
    """Return whether results are the expected ones, float64, rounded to their type, but for an error before that."""
    allowed = expected.abs() * (torch.finfo(found.dtype).eps / 2 * 1.01) + error
    return bool(((found.double() - expected).abs() <= allowed).all())


def _passes(
    trial: Callable[[Sequence[Function], *Ts], Trial], arguments: tuple[*Ts], functions: Sequence[Function]
) -> bool:
    found = trial(functions, *arguments)
    if not all(returns_alone(*call) for call in next(found)):
        return False
    try:
        next(found)
    except StopIteration as end:
        return bool(end.value)
    raise AssertionError("a trial has one part")
