"""The language that the CPU kernels are written in, run for real."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from llvmlite import ir

from nbengine.errors import NBEngineError
from nbengine.kernels.cpu.codegen import Element, Int, Vector, define
from nbengine.kernels.cpu.jit import compile_module
from nbengine.kernels.cpu.vectors import tanh


def compiled(body, parameters=1):
    def build(module):
        define(module, "function", parameters, body, exported=True)

    (function,) = compile_module(build, ["function"])
    return function


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


def call_with(body, memory, number):
    """Run `body(code, address of memory, number)`."""
    function = compiled(body, parameters=2)
    ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(function.address)(memory.ctypes.data, number)


def apply(operation, data, result, lanes=16):
    """Run `operation(code, vector)` over float32 data, storing float32."""
    packed = np.array([address(data), address(result), len(data)], np.int64)

    def body(code, args):
        source, target, count = (code.load_int(args + 8 * i) for i in range(3))
        with code.loop(0, count, lanes) as i:
            code.store(operation(code, code.load(source + i * 4, lanes)), target + i * 4)

    compiled(body).call(packed.ctypes.data)


def test_exp2_is_accurate_to_two_units_in_the_last_place():
    x = np.concatenate([np.linspace(-126, 0, 100_000), [-0.0, -1e-30, -0.5, -1.5, -125.999]])
    x = np.resize(x.astype(np.float32), 100_016)
    result = np.empty_like(x)
    apply(lambda code, vector: code.exp2(vector), x, result)
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(result - exact).max(initial=0, where=exact > 0) <= 1
    assert (np.abs(result - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


def test_exp2_is_zero_far_below_and_keeps_nan():
    x = np.array([-127, -1e10, -1e30, -3e30, -np.inf, np.nan, 0, -126] * 2, np.float32)
    result = np.empty_like(x)
    apply(lambda code, vector: code.exp2(vector), x, result)
    assert result[:5].tolist() == [0] * 5
    assert np.isnan(result[5])
    assert result[6:8].tolist() == [1, 2.0**-126]


@pytest.mark.parametrize(
    ("element", "dtype"), [(Element.BFLOAT16, torch.bfloat16), (Element.FLOAT16, torch.float16)]
)
def test_every_16_bit_value_widens_as_torch_widens_it(element, dtype):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values, result = bits.view(dtype), torch.empty(2**16)
    packed = np.array([address(values), address(result)], np.int64)

    def body(code, args):
        source, target = code.load_int(args), code.load_int(args + 8)
        with code.loop(0, code.integer(2**16), 16) as i:
            code.store(code.load(source + i * 2, 16, element), target + i * 4)

    compiled(body).call(packed.ctypes.data)
    assert torch.equal(result.nan_to_num(nan=12345.0), values.float().nan_to_num(nan=12345.0))


@pytest.mark.parametrize(
    ("element", "dtype"), [(Element.BFLOAT16, torch.bfloat16), (Element.FLOAT16, torch.float16)]
)
def test_narrowing_rounds_as_torch_rounds(element, dtype):
    exact = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    ties = (exact.view(torch.int32) + 0x8000).view(torch.float32)
    values = torch.cat([exact, ties, torch.randn(2**16), torch.tensor([torch.nan, torch.inf] * 8)])
    result = torch.empty(len(values), dtype=dtype)
    packed = np.array([address(values), address(result), len(values)], np.int64)

    def body(code, args):
        source, target, count = (code.load_int(args + 8 * i) for i in range(3))
        with code.loop(0, count, 16) as i:
            code.store(code.load(source + i * 4, 16), target + i * 2, element)

    compiled(body).call(packed.ctypes.data)
    expected = values.to(dtype)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


@pytest.mark.parametrize("limit", [-3, 0, 1, 15, 16, 40])
def test_mask_replaces_the_lanes_from_the_limit_on_even_if_they_are_nan(limit):
    x, result = np.full(16, np.nan, np.float32), np.empty(16, np.float32)
    x[: max(0, limit)] = 1
    apply(lambda code, v: code.mask_from(v, code.integer(0), code.integer(limit), -7.0), x, result)
    assert result.tolist() == [1.0 if i < limit else -7.0 for i in range(16)]


@pytest.mark.parametrize("lanes", [1, 2, 8, 16])
def test_reduce_folds_all_lanes(lanes):
    x, result = np.random.default_rng(0).normal(size=lanes).astype(np.float32), np.empty(lanes, np.float32)
    apply(lambda code, v: v.reduce(Vector.at_least).splat(lanes), x, result, lanes)
    assert (result == x.max()).all()
    apply(lambda code, v: v.reduce(Vector.__add__).splat(lanes), x, result, lanes)
    np.testing.assert_allclose(result, x.sum(), rtol=1e-5)


def test_integer_operations_and_control_flow_do_what_python_does():
    memory = np.zeros(8, np.int64)

    def body(code, args, n):
        code.store_int(n // 7 * 100 + n % 7, args)
        code.store_int(n.at_most(9), args + 8)
        code.store_int(n.at_most(code.integer(99)) - 4, args + 16)
        with code.when(n.compare(">", 50)):
            code.store_int(code.integer(1), args + 24)
        with code.when(n.compare("<=", 50)):
            code.store_int(code.integer(2), args + 24)
        with code.loop(2, n, 20) as i:
            code.store_int(code.load_int(args + 32) + i, args + 32)
        scratch: Int = code.stack(64)
        code.store_int(n, scratch + 56)
        code.store_int(code.load_int(scratch + 56), args + 40)
        code.store_lanes(code.load_bits(args, 2, Element.FLOAT32), args + 48, step=8)

    call_with(body, memory, 51)
    assert memory.tolist() == [702, 9, 47, 1, 2 + 22 + 42, 51, 702, 0]


def test_tickets_are_drawn_until_they_run_out():
    memory = np.zeros(12, np.int64)

    def body(code, args):
        with code.tickets(args, code.integer(10)) as ticket:
            code.store_int(ticket + 5, args + 8 + ticket * 8)

    compiled(body).call(memory.ctypes.data)
    assert memory.tolist() == [11, *range(5, 15), 0]


def test_code_that_llvm_refuses_is_a_named_error():
    def build(module):
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "function")
        function.append_basic_block("no_terminator")

    with pytest.raises(NBEngineError, match="could not compile the CPU kernels"):
        compile_module(build, ["function"])


def test_a_loop_runs_while_its_condition_holds_and_evaluates_it_before_each_round():
    memory = np.zeros(2, np.int64)

    def body(code, args, limit):
        with code.loop_while(lambda: code.load_int(args).compare("<", limit)):
            code.store_int(code.load_int(args) + 3, args)
            code.store_int(code.load_int(args + 8) + 1, args + 8)

    for limit, expected in ((7, [9, 3]), (0, [0, 0])):
        memory[:] = 0
        call_with(body, memory, limit)
        assert memory.tolist() == expected


def test_integers_are_bounded_from_below_chosen_and_stored_atomically():
    memory = np.zeros(6, np.int64)

    def body(code, args, n):
        code.store_int(n.at_least(code.integer(9)), args)
        code.store_int(n.at_least(code.integer(-9)), args + 8)
        code.store_int(n.if_else(n.compare("==", 4), code.integer(-1)), args + 16)
        code.store_int(n.if_else(n.compare("==", 5), code.integer(-1)), args + 24)
        code.store_release(n + 1, args + 32)
        code.fence()
        code.store_int(code.load_acquire(args + 32), args + 40)

    call_with(body, memory, 4)
    assert memory.tolist() == [9, 4, 4, -1, 5, 5]


@pytest.mark.parametrize("nbytes", [0, 1, 13, 4096])
def test_bytes_are_copied_and_no_others(nbytes):
    memory = np.random.default_rng(nbytes).integers(0, 255, 3 * 4096, np.uint8)
    expected = memory.copy()
    expected[5000 : 5000 + nbytes] = memory[7 : 7 + nbytes]
    call_with(lambda code, args, n: code.copy_bytes(args + 7, args + 5000, n), memory, nbytes)
    assert (memory == expected).all()


def test_functions_of_the_c_library_can_be_called():
    memory = np.array([-5, 7], np.int64)
    copy = ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value
    call_with(lambda code, args, n: code.call_address(copy, args, args + 8, n), memory, 8)
    assert memory.tolist() == [7, 7]


def test_tanh_is_accurate_to_three_units_in_the_last_place():
    small = np.logspace(-37, -1, 200_000)
    x = np.concatenate([small, np.linspace(0.1, 12, 300_000), [20, 90, 1e6, 1e30, np.inf]])
    x = np.resize(np.concatenate([x, -x, [0.0]]).astype(np.float32), 1_000_016)
    result = np.empty_like(x)
    apply(tanh, x, result)
    exact = np.tanh(x.astype(np.float64))
    assert (np.abs(result - exact) <= 3 * np.spacing(np.abs(exact).astype(np.float32))).all()
    assert (np.abs(result) <= 1).all()


def test_tanh_keeps_nan():
    x, result = np.full(16, np.nan, np.float32), np.zeros(16, np.float32)
    apply(tanh, x, result)
    assert np.isnan(result).all()


@pytest.mark.parametrize("limit", [-3, 0, 1, 15, 16, 40])
def test_mask_replaces_the_lanes_before_the_limit_even_if_they_are_nan(limit):
    x, result = np.full(16, np.nan, np.float32), np.empty(16, np.float32)
    x[max(0, limit) :] = 1
    apply(lambda code, v: code.mask_before(v, code.integer(0), code.integer(limit), -7.0), x, result)
    assert result.tolist() == [-7.0 if i < limit else 1.0 for i in range(16)]
