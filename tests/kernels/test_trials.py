"""A kernel that is wrong on this machine, or ends its process, is not used: one with fewer instruction sets is."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch
from llvmlite import ir

from nbengine.errors import NBEngineError
from nbengine.kernels.cpu import dense, jit, product_tiles, products, trials
from nbengine.kernels.cpu.alone import returns_alone
from nbengine.kernels.cpu.attention_functions import (
    compile_attention,
    compile_write_kv,
    compile_write_latent,
)
from nbengine.kernels.cpu.attention_trials import try_attention, try_write_kv, try_write_latent
from nbengine.kernels.cpu.codegen import Element, declare, define
from nbengine.kernels.cpu.dense import CpuDense, compile_dense
from nbengine.kernels.cpu.dense_parts import Instructions
from nbengine.kernels.cpu.dense_trials import try_dense, try_heads
from nbengine.kernels.cpu.dense_vectors import Block
from nbengine.kernels.cpu.expert_steps import compile_combine
from nbengine.kernels.cpu.flags import pause
from nbengine.kernels.cpu.head_products import HeadShape, compile_heads
from nbengine.kernels.cpu.integers import QuadProduct
from nbengine.kernels.cpu.jit import Function, Processor, compile_module, host_processor
from nbengine.kernels.cpu.largest import compile_largest
from nbengine.kernels.cpu.latent_rows import LatentRowShape, compile_latent_rows
from nbengine.kernels.cpu.layout import Features, Span
from nbengine.kernels.cpu.norm_rounding import compile_norm_round
from nbengine.kernels.cpu.product_trials import try_gated, try_multiply, try_round_rows, try_take_rows
from nbengine.kernels.cpu.quantized import CpuProducts
from nbengine.kernels.cpu.records import EIGHT_BITS, SIXTEEN_BITS
from nbengine.kernels.cpu.recurrent import (
    compile_delta_rule,
    compile_short_convolution,
    compile_state_space,
)
from nbengine.kernels.cpu.recurrent_layout import ConvolutionShape, MatrixShape
from nbengine.kernels.cpu.recurrent_trials import try_delta_rule, try_short_convolution, try_state_space
from nbengine.kernels.cpu.routing import compile_scores
from nbengine.kernels.cpu.row_functions import compile_clamped_gate, compile_rows
from nbengine.kernels.cpu.row_trials import try_clamped_gate, try_rows
from nbengine.kernels.cpu.step_trials import (
    try_combine,
    try_largest,
    try_latent_rows,
    try_norm_round,
    try_scores,
)
from nbengine.kernels.cpu.taken_rows import compile_take_rows
from nbengine.kernels.cpu.trials import without_instructions
from nbengine.kernels.dense_kernels import select_dense
from nbengine.kernels.quantized import FORMATS, pack
from nbengine.kernels.torch.dense import TiledProducts
from nbengine.worker.kernel_store import KernelStore
from tests.kernels.quantized_weights import random_parts
from tests.kernels.test_quantized_products import assert_equal_to_dense

FORM = FORMATS["q4_1"]
NARROW, WIDE = Element.BFLOAT16, Element.FLOAT32


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose kernels have never been compiled."""
    monkeypatch.setattr(jit, "_store", KernelStore(tmp_path / "kernels"))


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has compiled of the products."""
    monkeypatch.setattr(products, "_compile_multiply", cache(products._compile_multiply.__wrapped__))


def lesser(host: Processor, best: QuadProduct) -> QuadProduct:
    """The instructions of the first processor of the ladder that has not the best ones."""
    kinds = [QuadProduct.best(processor) for processor, _ in without_instructions(host)]
    return next(kind for kind in kinds if kind is not best)


def trap(code: Any) -> None:
    """Emit an instruction that no processor has."""
    code.builder.call(declare(code.builder.module, "llvm.trap", ir.FunctionType(ir.VoidType(), [])), [])


@pytest.mark.parametrize("fault", ["another sum", "an illegal instruction"])
@pytest.mark.usefixtures("store")
def test_products_that_are_wrong_do_without_their_instructions_from_then_on(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = host_processor()
    best = QuadProduct.best(host)
    if best is QuadProduct.PORTABLE:
        pytest.skip("this processor has no instructions to do without")
    real = product_tiles.add_quad_products

    def spoiled(code: Any, kind: QuadProduct, sums: Any, quads: Any, largest: int) -> Any:
        found = real(code, kind, sums, quads, largest)
        if kind is not best:
            return found
        if fault == "an illegal instruction":
            trap(code)
        return code.builder.add(found, ir.Constant(found.type, [1] * found.type.count))

    monkeypatch.setattr(product_tiles, "add_quad_products", spoiled)
    data = pack(FORM, random_parts(FORM, 37, 128, 1))
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(2))

    def use() -> str:
        caplog.clear()
        new_process(monkeypatch)
        kernels = CpuProducts()
        kernels.warm_up(FORM)
        assert_equal_to_dense(FORM, data, x, 37)
        # There is one for each layout of rounded rows.
        first, line = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert first == line
        assert f"({host.name}) the kernel multiply computes wrongly: it does without " in line
        assert kernels.instructions == lesser(host, best).value
        return line

    line = use()

    def refuse(*args: object) -> None:
        raise AssertionError(f"a later process tries and compiles nothing: {args}")

    monkeypatch.setattr(trials, "returns_alone", refuse)
    monkeypatch.setattr(jit, "_compile", refuse)
    assert use() == line


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.usefixtures("store")
def test_dense_products_that_are_wrong_do_without_theirs_and_in_the_end_leave_it_to_torch(
    everything: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best, *others = Instructions.of(host_processor(), NARROW)
    if not others and not everything:
        pytest.skip("this processor has no instructions to do without")
    real = dense._define_dense

    def spoiled(module: ir.Module, kind: Any, block: Block) -> None:
        if everything or kind.instructions is best:
            define(module, "dense", 1, lambda code, args: None, exported=True)
        else:
            real(module, kind, block)

    monkeypatch.setattr(dense, "_define_dense", spoiled)
    monkeypatch.setattr(dense, "compile_dense", cache(compile_dense.__wrapped__))
    select: Callable[..., Any] = select_dense.__wrapped__
    if everything:
        with pytest.raises(NBEngineError, match=r"the kernel dense computes wrongly on this processor"):
            CpuDense().warm_up(torch.bfloat16, torch.bfloat16)
        assert isinstance(select(torch.device("cpu"), torch.bfloat16), TiledProducts)
        assert "run through torch" in caplog.text
        return
    found = select(torch.device("cpu"), torch.bfloat16)
    assert found.chosen(torch.bfloat16) is others[0]
    assert found.instructions == others[0].value
    assert len(caplog.records) == 1
    chance = torch.Generator().manual_seed(3)
    x, weight = torch.randn(5, 70, generator=chance), torch.randn(9, 70, generator=chance).bfloat16()
    expected = x.bfloat16().double() @ weight.double().T
    torch.testing.assert_close(found.linear(x, weight).double(), expected, rtol=1e-5, atol=1e-4)


def compiled(body: Callable[[Any, Any], None]) -> Function:
    (function,) = compile_module(
        lambda module: define(module, "function", 1, body, exported=True), ["function"]
    )
    return function


class Number(ctypes.Structure):
    _fields_ = [("value", ctypes.c_int64)]


def test_a_call_alone_leaves_its_results_and_cannot_end_this_process() -> None:
    add = compiled(lambda code, args: code.store_int(code.load_int(args) + 3, args))
    number = Number(4)
    assert returns_alone(add, number)
    assert number.value == 7
    assert not returns_alone(compiled(lambda code, args: trap(code)), number)
    nowhere = compiled(lambda code, args: code.store_int(code.integer(1), code.load_int(args)))
    assert not returns_alone(nowhere, Number(8))
    assert returns_alone(add, number)
    assert number.value == 10


def test_a_call_alone_that_does_not_return_ends_when_its_time_is_over() -> None:
    def wait(code: Any, args: Any) -> None:
        with code.loop_while(lambda: code.load_int(args).compare("==", 4)):
            pause(code)

    number = Number(4)
    assert not returns_alone(compiled(wait), number, seconds=0.05)
    number.value = 5
    assert returns_alone(compiled(wait), number, seconds=0.05)


def test_without_processes_that_share_memory_a_call_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    add = compiled(lambda code, args: code.store_int(code.load_int(args) + 3, args))
    number = Number(4)
    monkeypatch.setattr("nbengine.kernels.cpu.alone._clone", lambda: None)
    assert returns_alone(add, number)
    monkeypatch.setattr("nbengine.kernels.cpu.alone._clone", lambda: lambda *args: -1)
    assert returns_alone(add, number)
    assert number.value == 10


def test_a_processor_does_without_its_newest_instruction_sets_first() -> None:
    has = ("amx-tile", "amx-bf16", "avx512f", "avx512vnni", "avx512bf16", "avx2", "fma", "f16c", "avx")
    host = Processor("any", llvm.FeatureMap(dict.fromkeys(has, True)))
    steps = [
        ({name for name, there in processor.features.items() if there}, lacking)
        for processor, lacking in without_instructions(host)
    ]
    names = ["AMX", "VNNI and products of bfloat16", "AVX-512", "AVX2"]
    assert [lacking for _, lacking in steps] == [names[:count] for count in range(5)]
    assert steps[1][0] == set(has[2:])
    assert steps[2][0] == {"avx512f", *has[5:]}
    assert steps[3][0] == set(has[5:])
    assert steps[4][0] == {"fma", "f16c", "avx"}
    nothing = Processor("any", llvm.FeatureMap({"sse2": True, "avx2": False}))
    assert [lacking for _, lacking in without_instructions(nothing)] == [[]]


Tried = tuple[Sequence[Function], Callable[..., Any], tuple[Any, ...]]
"""The functions of a kernel, its trial, and what it is compiled for."""


def attention(*features: Any, element: Element = WIDE, rank: int = 0) -> Tried:
    found = compile_attention(32, 3, 16, element, WIDE, Features(*features), rank)
    return (found.decode, found.prefill), try_attention, (found.decode_shape, found.prefill_shape)


def recurrent() -> list[Tried]:
    budget = host_processor().accumulators
    matrix, wide = MatrixShape(32, 48, WIDE, budget), ConvolutionShape(70, 4, WIDE, True, True, budget)
    convolution, _ = compile_short_convolution(70, 4, WIDE, True, True)
    return [
        (compile_delta_rule(32, 48, WIDE)[:1], try_delta_rule, (matrix,)),
        (compile_state_space(32, 48, WIDE)[:1], try_state_space, (matrix,)),
        ([convolution], try_short_convolution, (wide,)),
    ]


def every_trial() -> list[Tried]:
    kind, heads = QuadProduct.best(host_processor()), HeadShape(33, 20, NARROW, WIDE, True)
    block = Block.of(host_processor().accumulators)
    dense_kind, function, _ = compile_dense(NARROW, WIDE)
    clamp, written, latent = (1.7, 7.0), (32, 16, NARROW, WIDE), LatentRowShape(2, 16, 32, 48, True)
    return [
        ([products.compile_round_rows(EIGHT_BITS)], try_round_rows, (EIGHT_BITS,)),
        ([products.compile_round_rows(SIXTEEN_BITS)], try_round_rows, (SIXTEEN_BITS,)),
        ([products.compile_multiply(FORM, EIGHT_BITS)], try_multiply, (FORM, EIGHT_BITS, kind, False)),
        ([products.compile_multiply(FORM, SIXTEEN_BITS)], try_multiply, (FORM, SIXTEEN_BITS, kind, False)),
        ([products.compile_gated(FORM, EIGHT_BITS)], try_gated, (FORM, EIGHT_BITS, kind, "silu", False)),
        ([products.compile_gated(FORM, SIXTEEN_BITS)], try_gated, (FORM, SIXTEEN_BITS, kind, "silu", False)),
        ([compile_take_rows(NARROW)], try_take_rows, (NARROW, False)),
        ([function], try_dense, (dense_kind, block)),
        ([compile_heads(heads)], try_heads, (heads, 0)),
        attention(),
        attention(Span.WINDOW, True, True, element=Element.INT8),
        attention(element=NARROW, rank=16),
        ([compile_write_kv(*written)], try_write_kv, written),
        ([compile_write_latent(32, NARROW, WIDE)], try_write_latent, (32, NARROW, WIDE)),
        ([compile_rows("rotate", 3, NARROW, 32)], try_rows, ("rotate", 3, NARROW, 32, False, 0)),
        ([compile_clamped_gate(48, WIDE, clamp)], try_clamped_gate, (48, WIDE, clamp)),
        *recurrent(),
        ([compile_norm_round(96, EIGHT_BITS, adds=True)], try_norm_round, (96, EIGHT_BITS, True)),
        ([compile_norm_round(96, SIXTEEN_BITS, adds=True)], try_norm_round, (96, SIXTEEN_BITS, True)),
        ([compile_latent_rows(latent)], try_latent_rows, (latent,)),
        ([compile_scores(NARROW)], try_scores, (NARROW,)),
        ([compile_combine(48)], try_combine, (48,)),
        (compile_largest(), try_largest, ()),
    ]


def test_every_trial_passes_what_is_right_and_refuses_what_does_nothing() -> None:
    nothing = compiled(lambda code, args: None)
    for functions, trial, arguments in every_trial():
        assert trials._passes(trial, arguments, functions), trial
        assert not trials._passes(trial, arguments, [nothing] * len(functions)), trial
