"""The Triton kernels in Triton's interpreter, against the reference; run by `test_triton_interpreter.py`.

The interpreter has to be chosen before Triton is imported, for the whole process.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.runtime import interpreter

from nbengine.errors import InvalidArgumentError
from nbengine.kernels import reference
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.triton import experts as experts_triton
from nbengine.kernels.triton import latent_attention as latent_attention_triton
from nbengine.kernels.triton import paged_attention as paged_attention_triton
from nbengine.kernels.triton import row_functions as rows_triton
from nbengine.kernels.triton import write_kv as write_kv_triton
from nbengine.kernels.triton.recurrent import TritonRecurrent
from tests.kernels.conftest import EXPERT_BATCHES
from tests.kernels.latent_batches import LatentBatch
from tests.kernels.recurrent_batches import (
    Heads,
    Request,
    Space,
    Step,
    check_convolution,
    check_delta_rule,
    check_state_space,
)
from tests.support.thorough import amount, combinations, in_turn

LENS = {
    "decode": [(1, n) for n in (1, 15, 16, 17, 129, 270)],
    "prefill": [(2, 2), (17, 17), (3, 66)],
    "mixed": [(1, 33), (1, 140), (4, 4), (23, 70)],
}
SHAPES = [(9, 3, 64, 16), (4, 4, 80, 8), (8, 1, 32, 32), (2, 2, 96, 64)]
MANY_PROCESSORS, ONE_PROCESSOR = 132, 1


class InterpretedKernels:
    """A stand-in for `TritonKernels` on the CPU."""

    name = "triton"
    keys_transposed = False

    def __init__(self, processors: int) -> None:
        self.paged_attention = functools.partial(
            paged_attention_triton.paged_attention, processors=processors
        )
        self.write_kv = write_kv_triton.write_kv
        self.latent_attention = functools.partial(
            latent_attention_triton.latent_attention, processors=processors
        )
        self.write_latent = latent_attention_triton.write_latent


@pytest.fixture(autouse=True)
def replace_the_language_once_a_launch(monkeypatch):
    """Each call of a helper would replace all of the language again, which takes a third of the time."""
    patch_lang = interpreter._patch_lang

    def patch_what_is_not(fn):
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return patch_lang(fn) if any(tl.core.is_builtin(language.load) for language in languages) else None

    monkeypatch.setattr(interpreter, "_patch_lang", patch_what_is_not)


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
    for shape, lens in combinations(SHAPES, LENS, together=1):
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
    assert_close(batch.run(), batch.expected(), weights=batch.query.dtype)


RULES: dict[str, dict[str, int]] = {
    "all": {},
    "window of itself": {"window": 1},
    "window below a block": {"window": 5},
    "window of several blocks": {"window": 50},
    "window of several splits": {"window": 300},
    "chunk below a block": {"chunk": 6},
    "chunk of several blocks": {"chunk": 40},
    # The shorter rows of every batch are within all these rules, too.
    **amount({}, thorough={"window beyond all": {"window": 10_000}, "chunk beyond all": {"chunk": 10_000}}),
}


EXTRAS = {"rule": {}, "cap": {"soft_cap": 3.0}, "sinks": {"sinks": torch.linspace(-3, 4, 6)}}


OPTIONS = amount(
    [
        *((rule, MANY_PROCESSORS, extras) for rule, extras in in_turn(RULES, EXTRAS)),
        ("window of several blocks", ONE_PROCESSOR, "sinks"),
        ("chunk of several blocks", ONE_PROCESSOR, "rule"),
    ],
    thorough=list(itertools.product(RULES, [ONE_PROCESSOR, MANY_PROCESSORS], EXTRAS)),
)


@pytest.mark.parametrize(("rule", "processors", "extras"), OPTIONS)
def test_attention_under_options_equals_the_reference_and_reads_nothing_out_of_sight(
    make_batch, make_shape, forget_unseen, assert_close, rule, processors, extras
):
    longest = 430 if rule == "window of several splits" else amount(200, thorough=430)
    lens = [(1, 1), (1, 33), (1, longest), (23, 70)]
    batch = make_batch(InterpretedKernels(processors), make_shape(6, 2, 40, 16), lens)
    batch.options = AttentionOptions(0.2, **RULES[rule], **EXTRAS[extras])
    forget_unseen(batch)
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize(
    ("head_dim", "dtype", "processors"),
    combinations([80, 192], [torch.float32, torch.bfloat16], [MANY_PROCESSORS, ONE_PROCESSOR], together=1),
)
def test_heads_of_every_size_have_all_options(
    make_batch, make_shape, forget_unseen, assert_close, head_dim, dtype, processors
):
    batch = make_batch(
        InterpretedKernels(processors), make_shape(4, 2, head_dim, 16), [(1, 200), (9, 70)], dtype
    )
    batch.options = AttentionOptions(0.1, window=50, soft_cap=5.0, sinks=torch.linspace(-1, 1, 4).to(dtype))
    forget_unseen(batch)
    assert_close(batch.run(), batch.expected(), weights=batch.query.dtype)


def test_a_sink_of_minus_infinity_takes_no_weight(make_batch, make_shape, assert_close):
    for processors in (ONE_PROCESSOR, MANY_PROCESSORS):
        batch = make_batch(InterpretedKernels(processors), make_shape(6, 2, 32, 16), [(1, 300), (9, 50)])
        plain = batch.expected()
        batch.options = AttentionOptions(batch.options.scale, sinks=torch.full((6,), -torch.inf))
        assert_close(batch.run(), plain)


def test_sinks_of_another_number_of_heads_are_refused(make_batch, make_shape):
    batch = make_batch(InterpretedKernels(1), make_shape(6, 2, 32, 16), [(1, 4)])
    batch.options = AttentionOptions(1.0, sinks=torch.zeros(5))
    with pytest.raises(InvalidArgumentError, match=r"sinks must be \[6\]"):
        batch.run()


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


LATENT_LENS = {
    "decode": [(1, 1), (1, 32), (1, 33), (1, 270)],
    "prefill": [(2, 2), (7, 66)],
    "mixed": [(1, 140), (3, 3), (9, 40)],
}
LATENT_SHAPES = [(5, 24, 8, 16), (20, 33, 7, 64)]
"""Heads, rank, dimensions that turn, and tokens a block."""


@pytest.mark.parametrize(
    ("lens", "shape", "processors"),
    [
        *((lens, shape, MANY_PROCESSORS) for lens, shape in in_turn(LATENT_LENS, LATENT_SHAPES)),
        *((lens, shape, ONE_PROCESSOR) for shape, lens in in_turn(LATENT_SHAPES, LATENT_LENS)),
    ],
)
def test_latent_attention_equals_the_reference_and_reads_no_poison(assert_close, lens, shape, processors):
    batch = LatentBatch.of(InterpretedKernels(processors), shape, LATENT_LENS[lens])
    assert_close(batch.run(), batch.expected())


def test_latent_attention_of_bfloat16_equals_the_reference(assert_close):
    for lens in amount([LATENT_LENS["mixed"]], thorough=list(LATENT_LENS.values())):
        batch = LatentBatch.of(InterpretedKernels(MANY_PROCESSORS), LATENT_SHAPES[0], lens, torch.bfloat16)
        assert_close(batch.run(), batch.expected(), weights=batch.query.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_written_bit_for_bit(dtype):
    LatentBatch.of(InterpretedKernels(1), LATENT_SHAPES[1], [(1, 20), (1, 3)], dtype).check_write()


@pytest.mark.parametrize(("sizes", "dtype"), in_turn(EXPERT_BATCHES, [torch.float32, torch.bfloat16]))
def test_experts_equal_the_reference_and_read_no_poison(expert_batch, sizes, dtype):
    batch = expert_batch.random(**EXPERT_BATCHES[sizes], dtype=dtype)
    batch.check(batch.run(experts_triton.TritonExperts()))


def test_assignments_are_sorted_in_chunks_as_in_one(monkeypatch, expert_batch):
    batch = expert_batch.random(20, 6, 2, elsewhere=3)
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


STEPS = {
    "decodes": [Request(1, "own"), Request(1, "zeros"), Request(1, "other", (1,))],
    "prompts": [Request(16, "zeros"), Request(33, "own"), Request(2, "other")],
    "mixed": [
        Request(1),
        Request(1, "zeros", (1,)),
        Request(37, "own", (4, 16, 36)),
        Request(2, "other", (1, 2)),
    ],
}
SEPARATE = amount(["decodes", "prompts"], thorough=list(STEPS))


@pytest.mark.parametrize(
    ("requests", "heads"), combinations(STEPS, [Heads(1, 2, 32, 48), Heads(1, 1, 20, 37)], together=1)
)
def test_the_delta_rule_equals_the_reference_and_touches_no_other_slot(requests, heads):
    check_delta_rule(Step.of(TritonRecurrent(), STEPS[requests]), heads)


@pytest.mark.parametrize("requests", SEPARATE)
def test_the_delta_rule_of_bfloat16_equals_the_reference(requests):
    check_delta_rule(Step.of(TritonRecurrent(), STEPS[requests]), Heads(1, 2, 16, 16), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("requests", "sizes", "silu"), combinations(STEPS, [(140, 4), (7, 2)], [True, False], together=1)
)
def test_the_convolution_equals_the_reference_and_touches_no_other_slot(requests, sizes, silu):
    step = Step.of(TritonRecurrent(), STEPS[requests])
    check_convolution(step, *sizes, silu=silu, has_bias=not silu)


@pytest.mark.parametrize(
    ("requests", "sizes"),
    combinations([*STEPS, "several chunks"], [Space(1, 2, 32, 48), Space(2, 2, 20, 37)], together=1),
)
def test_the_state_space_equals_the_reference_and_touches_no_other_slot(requests, sizes):
    several = [Request(1), Request(150, "own", (80,)), Request(70, "zeros")]
    check_state_space(Step.of(TritonRecurrent(), STEPS.get(requests, several)), sizes)


@pytest.mark.parametrize("requests", SEPARATE)
def test_the_state_space_of_bfloat16_equals_the_reference(requests):
    check_state_space(Step.of(TritonRecurrent(), STEPS[requests]), Space(1, 2, 16, 16), dtype=torch.bfloat16)


CPU = torch.device("cpu")
EPS = 1e-5
ACTIVATE = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}
ROW_TYPES = [torch.float32, torch.float16]
"""The interpreter cuts what is stored as bfloat16, where devices round."""
PLACES = {torch.float32: 1e-6, torch.float16: 2.0**-11 * 1.01, torch.bfloat16: 2.0**-7}


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is NaN."""
    monkeypatch.setattr(torch, "empty", functools.partial(torch.full, fill_value=torch.nan))


def inside_nan(x):
    """A view with the numbers of x [T, ..., n], of which each row of a token lies among numbers that are NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), torch.nan, dtype=x.dtype)
    wide[..., 8:-8] = x
    return wide[..., 8:-8]


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype"),
    [
        ((35, 16), torch.float32, torch.float32),
        ((9, 3, 64), torch.float16, torch.float16),
        ((2, 5, 72), torch.float16, torch.float32),
        ((3, 1500), torch.bfloat16, torch.float32),
    ],
)
def test_rows_are_normalised_where_they_lie_and_alike_alone(poisoned, shape, dtype, weight_dtype):
    x, weight = inside_nan(normal(*shape, dtype=dtype)), normal(shape[-1], dtype=weight_dtype)
    norm = rows_triton.TritonRMSNorm(weight, EPS, dtype)
    found = norm(x)
    assert (found.dtype, found.is_contiguous()) == (dtype, True)
    expected = F.rms_norm(x.double(), weight.shape, weight.double(), EPS)
    torch.testing.assert_close(found.double(), expected, rtol=PLACES[dtype], atol=1e-6)
    assert torch.equal(norm(x[1:2])[0], found[1])


@pytest.mark.parametrize(("dtype", "scale"), [(ROW_TYPES[0], 1), (ROW_TYPES[1], 0.22)])
def test_what_is_added_before_a_norm_stays_added(poisoned, dtype, scale):
    stream, added = (inside_nan(normal(3, size, dtype=dtype)[:, :1100]) for size in (1100, 1101))
    norm = rows_triton.TritonRMSNorm(normal(1100, dtype=dtype), EPS, dtype)
    expected = (stream.float() + added.float() * scale).to(dtype)
    found = norm.after_adding(stream, added, scale)
    assert torch.equal(stream, expected)
    assert torch.equal(found, norm(expected))


def test_rows_with_zeros_and_infinities_are_those_of_torch():
    x = torch.tensor([[0.0, -0.0] * 8, [torch.inf, 1.0] * 8, [-torch.inf] * 16, [torch.nan, 2.0] * 8])
    norm = rows_triton.TritonRMSNorm(torch.ones(16), EPS, torch.float32)
    with np.errstate(invalid="ignore"):
        found = norm(x)
        passed = {each: rows_triton.TritonPairGate(16, x.dtype, each, CPU)(x, x) for each in ACTIVATE}
    expected = F.rms_norm(x, (16,), torch.ones(16), EPS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[0], expected.signbit()[0])
    for each, activate in ACTIVATE.items():
        torch.testing.assert_close(passed[each], activate(x) * x, equal_nan=True)


@pytest.mark.parametrize(("activation", "dtype"), combinations(ACTIVATE, ROW_TYPES))
def test_gates_of_halves_and_of_pairs_are_rounded_once(poisoned, activation, dtype):
    size = 1100 if dtype is torch.float16 else 24
    both = (normal(3, 2 * size) * 20).to(dtype)
    gate, other = both.chunk(2, dim=-1)
    expected = ACTIVATE[activation](gate.double()) * other.double()
    halves = rows_triton.TritonGate(size, dtype, activation, CPU)(inside_nan(both))
    pair = rows_triton.TritonPairGate(size, dtype, activation, CPU)(inside_nan(gate), inside_nan(other))
    # Far below 0 the reference is the difference of numbers that are almost equal.
    smallest = max(1e-12, float(torch.finfo(dtype).smallest_normal))
    torch.testing.assert_close(halves.double(), expected, rtol=PLACES[dtype], atol=smallest)
    assert torch.equal(pair, halves)


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [(5, 96, ROW_TYPES[0]), (37, 32, ROW_TYPES[1])])
def test_heads_are_turned_where_they_lie(poisoned, heads, head_dim, dtype):
    x = torch.cat([normal(3, heads, head_dim), torch.full((3, 2, head_dim), torch.nan)], dim=1).to(dtype)
    angles = normal(3, 2, 1, head_dim, dtype=dtype)
    cos, sin = angles.double().unbind(1)
    turned = x[:, :heads].double()
    expected = turned * cos + turned.roll(head_dim // 2, -1) * sin
    rotation = rows_triton.TritonRotation(heads, head_dim, dtype, CPU)
    found = rotation(x[:, :heads], angles)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=PLACES[dtype], atol=1e-6)
    assert torch.equal(rotation(x[1:2, :heads], angles[1:2])[0], found[1])
