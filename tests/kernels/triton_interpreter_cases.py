"""The Triton kernels in Triton's interpreter, against the reference; run by `test_triton_interpreter.py`.

The interpreter has to be chosen before Triton is imported, for the whole process.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from nbengine.kernels import experts_triton, paged_attention_triton, reference, write_kv_triton

LENS = {
    "decode": [(1, n) for n in (1, 15, 16, 17, 129, 270)],
    "prefill": [(2, 2), (17, 17), (3, 66)],
    "mixed": [(1, 33), (1, 140), (4, 4), (23, 70)],
}
SHAPES = [(9, 3, 64, 16), (4, 4, 80, 8), (8, 1, 32, 32), (2, 2, 96, 64)]
MANY_PROCESSORS, ONE_PROCESSOR = 132, 1


class InterpretedKernels:
    """What `TritonKernels` does, on the CPU."""

    name = "triton"
    keys_transposed = False

    def __init__(self, processors: int) -> None:
        self.paged_attention = functools.partial(
            paged_attention_triton.paged_attention, processors=processors
        )
        self.write_kv = write_kv_triton.write_kv


@pytest.fixture(autouse=True)
def multiply_bfloat16_values(monkeypatch):
    """The interpreter holds bfloat16 as integers, and its matrix product would multiply those."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        values = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def patched(self, a, b, *rest):
        return create_dot(self, widen(a), widen(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", patched)


def cases():
    """Every shape in float32, every type with the default model's shape, splits on and off in decode."""
    for shape in SHAPES:
        for lens in LENS:
            yield shape, lens, torch.float32, MANY_PROCESSORS
    yield SHAPES[0], "decode", torch.float32, ONE_PROCESSOR
    for dtype in (torch.bfloat16, torch.float16):
        yield SHAPES[0], "mixed", dtype, MANY_PROCESSORS


def test_the_kernels_are_interpreted():
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize(("shape", "lens", "dtype", "processors"), list(cases()))
def test_attention_equals_the_reference_and_reads_no_poison(
    make_batch, make_shape, assert_close, shape, lens, dtype, processors
):
    batch = make_batch(InterpretedKernels(processors), make_shape(*shape), LENS[lens], dtype)
    assert_close(batch.run(), batch.expected(), exact_weights=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_equals_the_reference_bit_for_bit(make_batch, make_shape, dtype):
    batch = make_batch(InterpretedKernels(1), make_shape(6, 3, 40, 8), [(1, 20), (1, 3)], dtype)
    slots = batch.all_slots.clone()
    slots[5] = -1
    joint = torch.stack([batch.key, batch.value], dim=1)
    expected, actual = torch.zeros_like(batch.kv_cache), torch.zeros_like(batch.kv_cache)
    reference.write_kv(batch.key, batch.value, expected, slots)
    batch.metadata.kernels.write_kv(joint[:, 0], joint[:, 1], actual, slots)
    assert torch.equal(actual, expected)


def test_queries_in_a_joint_projection_are_read_in_place(make_batch, make_shape, assert_close):
    batch = make_batch(InterpretedKernels(1), make_shape(6, 2, 32, 16), [(1, 20), (3, 9)])
    batch.query = torch.cat([batch.query, torch.full((4, 4, 32), float("nan"))], dim=1)[:, :6]
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_the_reference_and_read_no_poison(make_expert_batch, dtype):
    batch = make_expert_batch(dtype=dtype)
    batch.check(batch.run(experts_triton.TritonExperts()))


def test_assignments_are_sorted_in_chunks_as_in_one(monkeypatch, expert_batch):
    batch = expert_batch.random(50, 6, 2, elsewhere=3)
    whole = batch.run(experts_triton.TritonExperts())
    monkeypatch.setattr(experts_triton, "_CHUNK", 16)
    assert torch.equal(batch.run(experts_triton.TritonExperts()), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_warm_up_runs_every_tiling_that_can_be_chosen(monkeypatch, expert_batch, dtype):
    batch = expert_batch.random(4, 3, 2, hidden=32, inner=16, dtype=dtype)
    choose, chosen = experts_triton.choose_tiling, []

    def noting(*arguments):
        tiling = choose(*arguments)
        chosen.append(tiling)
        return tiling

    monkeypatch.setattr(experts_triton, "choose_tiling", noting)
    experts_triton.TritonExperts().warm_up(batch.gate_up, batch.down, 2)
    assert set(chosen) == {choose(assignments, 3, dtype) for assignments in range(1, 2000)}
