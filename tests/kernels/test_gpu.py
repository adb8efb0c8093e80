"""The Triton kernels on a real device, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from nbengine.kernels import reference
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.dispatch import select_expert_kernels, select_kernels, select_recurrent_kernels
from nbengine.kernels.row_kernels import select_gate, select_pair_gate, select_rms_norm, select_rotation
from nbengine.kernels.torch.backend import TorchKernels
from nbengine.kernels.torch.experts import TorchExperts
from tests.kernels.recurrent_batches import (
    Request,
    Space,
    Step,
    check_convolution,
    check_delta_rule,
    check_state_space,
)
from tests.kernels.test_recurrent import HEADS, STEPS
from tests.support.thorough import combinations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SHAPES = [(9, 3, 64, 16), (32, 8, 128, 16), (4, 4, 80, 8), (8, 1, 96, 32), (4, 2, 256, 64), (16, 8, 32, 16)]
LENS = {
    "decode": [(1, n) for n in (1, 15, 16, 17, 127, 128, 129, 1000, 4097)],
    "prefill": [(n, n) for n in (2, 15, 16, 17, 63, 64, 65, 300)],
    "mixed": [(1, 33), (1, 2000), (4, 4), (17, 100), (200, 1100)],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def make_kernels():
    def make(dtype):
        kernels = select_kernels(torch.device("cuda"), dtype)
        assert kernels.name == "triton"
        return kernels

    return make


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", list(LENS))
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_the_reference_and_reads_no_poison(
    make_kernels, make_batch, make_shape, assert_close, shape, lens, dtype
):
    batch = make_batch(make_kernels(dtype), make_shape(*shape), LENS[lens], dtype, device="cuda")
    assert_close(batch.run(), batch.expected(), weights=batch.query.dtype)


RULES: dict[str, dict[str, int]] = {"all": {}, "window": {"window": 50}, "chunk": {"chunk": 40}}


@pytest.mark.parametrize(
    ("rule", "extras", "dtype"), combinations(RULES, ["rule", "cap", "sinks"], DTYPES, together=2)
)
def test_attention_under_options_equals_the_reference(
    make_kernels, make_batch, make_shape, forget_unseen, assert_close, rule, extras, dtype
):
    lens = [(1, 1), (1, 33), (1, 430), (1, 3000), (23, 70)]
    batch = make_batch(make_kernels(dtype), make_shape(6, 2, 40, 16), lens, dtype, device="cuda")
    sinks = torch.linspace(-3, 4, 6, device="cuda").to(dtype) if extras == "sinks" else None
    cap = 3.0 if extras == "cap" else None
    batch.options = AttentionOptions(0.2, soft_cap=cap, sinks=sinks, **RULES[rule])
    forget_unseen(batch)
    assert_close(batch.run(), batch.expected(), weights=batch.query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_equals_the_reference_bit_for_bit(make_kernels, make_batch, make_shape, dtype):
    kernels = make_kernels(dtype)
    batch = make_batch(kernels, make_shape(6, 3, 80, 8), [(1, 200), (1, 3)], dtype, device="cuda")
    slots = batch.all_slots.clone()
    slots[5] = -1
    expected, actual = torch.zeros_like(batch.kv_cache), torch.zeros_like(batch.kv_cache)
    reference.write_kv(batch.key, batch.value, expected, slots)
    kernels.write_kv(batch.key, batch.value, actual, slots)
    assert torch.equal(actual, expected)


def test_kernels_are_right_after_a_warm_up(make_kernels, make_batch, make_shape, assert_close):
    kernels = make_kernels(torch.bfloat16)
    kernels.warm_up(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16)
    batch = make_batch(kernels, make_shape(9, 3, 64, 16), LENS["mixed"], torch.bfloat16, device="cuda")
    assert_close(batch.run(), batch.expected(), weights=batch.query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_equals_the_reference(make_batch, make_shape, assert_close, dtype):
    batch = make_batch(TorchKernels(), make_shape(9, 3, 64, 16), LENS["mixed"], dtype, device="cuda")
    assert_close(batch.run(), batch.expected(), weights=batch.query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_equal_the_reference_and_read_no_poison(make_expert_batch, dtype):
    kernels = select_expert_kernels(torch.device("cuda"), dtype)
    assert kernels.name == "triton"
    batch = make_expert_batch(dtype=dtype, device="cuda")
    output = batch.run(kernels)
    batch.check(output)
    assert torch.equal(batch.run(kernels), output)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_a_real_size_equal_plain_torch(expert_batch, dtype):
    kernels = select_expert_kernels(torch.device("cuda"), dtype)
    for num_tokens in (1, 16, 700):
        batch = expert_batch.random(
            num_tokens, 64, 8, hidden=1024, inner=384, elsewhere=64, dtype=dtype, device="cuda"
        )
        # Both round to bfloat16: results of 4 and more may differ by a last bit, 2**-7 of their size.
        rtol, atol = (0, 1e-4) if dtype is torch.float32 else (2**-7, 3e-2)
        torch.testing.assert_close(batch.run(kernels), batch.run(TorchExperts()), rtol=rtol, atol=atol)


CUDA = torch.device("cuda")
ROUNDING = 4.0
"""A device takes other exponentials than the reference, and sums in another order."""
IN_STATES = {torch.float32: torch.float32, torch.bfloat16: torch.float16, torch.float16: torch.float16}
"""The type whose precision states have: products of 16-bit models are in TensorFloat-32, with as many bits as float16."""
SEVERAL_CHUNKS = [Request(1), Request(150, "own", (80,)), Request(70, "zeros")]


@pytest.fixture
def recurrent_step():
    """Make the metadata of a step with the recurrent kernels of the device."""

    def make(requests, dtype):
        kernels = select_recurrent_kernels(CUDA, dtype)
        assert kernels.name == "triton"
        return Step.of(kernels, requests, device="cuda")

    return make


@pytest.mark.parametrize(("requests", "heads", "dtype"), combinations(STEPS, HEADS, DTYPES))
def test_the_delta_rule_equals_the_reference_and_touches_no_other_slot(
    recurrent_step, requests, heads, dtype
):
    step, state = recurrent_step(STEPS[requests], dtype), IN_STATES[dtype]
    check_delta_rule(step, heads, dtype=dtype, scale=ROUNDING, state_dtype=state)


@pytest.mark.parametrize(
    ("requests", "sizes", "silu", "dtype"),
    combinations(STEPS, [(64, 4), (83, 4), (7, 3), (600, 2), (8192, 4)], [True, False], DTYPES),
)
def test_the_convolution_equals_the_reference_and_touches_no_other_slot(
    recurrent_step, requests, sizes, silu, dtype
):
    step = recurrent_step(STEPS[requests], dtype)
    check_convolution(step, *sizes, silu=silu, has_bias=not silu, dtype=dtype)


@pytest.mark.parametrize(
    ("requests", "sizes", "dtype"),
    combinations(
        [*STEPS, "several chunks"],
        [Space(), Space(1, 2, 20, 37), Space(1, 8, 128, 64), Space(2, 4, 16, 64)],
        DTYPES,
    ),
)
def test_the_state_space_equals_the_reference_and_touches_no_other_slot(
    recurrent_step, requests, sizes, dtype
):
    step, state = recurrent_step(STEPS.get(requests, SEVERAL_CHUNKS), dtype), IN_STATES[dtype]
    check_state_space(step, sizes, dtype=dtype, scale=4 * ROUNDING, state_dtype=state)


EPS = 1e-5
NARROW = [torch.bfloat16, torch.float16]
SIZES = [64, 96, 128, 576, 2048, 2304, 5632, 8192]
ROWS = [1, 2, 7, 33, 300]


def normal(*shape, dtype, spread=1.0):
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device=CUDA) * spread).to(dtype)


def assert_rounded_once(found, expected, absolute=1e-6):
    """Compare with float64 to half of the last place, and a little for the arithmetic in float32."""
    places = torch.finfo(found.dtype).eps / 2 * 1.01 + 1e-6
    torch.testing.assert_close(found.double(), expected, rtol=places, atol=absolute)


@pytest.mark.parametrize(("size", "dtype", "is_wide"), combinations(SIZES, NARROW, [False, True]))
def test_rows_are_normalised_alike_alone_and_among_others(size, dtype, is_wide):
    weight = normal(size, dtype=torch.float32 if is_wide else dtype)
    norm = select_rms_norm(weight, EPS, dtype)
    for rows in ROWS:
        # As of queries and keys: the rows are parts of wider ones.
        heads = normal(rows, 3, size, dtype=dtype, spread=7)[:, 1:]
        x = heads[:, 0].contiguous()
        expected = F.rms_norm(heads.double(), (size,), weight.double(), EPS)
        assert_rounded_once(norm(heads), expected)
        assert torch.equal(norm(x), norm(heads)[:, 0])
        assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))


@pytest.mark.parametrize(("size", "dtype", "scale"), combinations(SIZES, NARROW, [1.0, 0.22]))
def test_what_is_added_before_a_norm_stays_added_and_is_rounded_once(size, dtype, scale):
    norm = select_rms_norm(normal(size, dtype=dtype), EPS, dtype)
    for rows in ROWS:
        stream, added = normal(rows, size, dtype=dtype), normal(rows + 1, size, dtype=dtype)[1:]
        expected = stream.double() + added.double() * scale
        pairs = [(stream[i : i + 1].clone(), added[i : i + 1]) for i in range(rows)]
        found = norm.after_adding(stream, added, scale)
        assert_rounded_once(stream, expected)
        assert_rounded_once(found, F.rms_norm(stream.double(), (size,), norm._weight.double(), EPS))
        assert torch.equal(found, torch.cat([norm.after_adding(*pair, scale) for pair in pairs]))


def gelu_tanh(x):
    """Return `F.gelu(x, approximate="tanh")`, which loses the digits of results near 0: 1 + tanh(y) is 2 sigmoid(2 y)."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


NOTHING = 1e-34
"""A gate may be that far off, where float32 holds an exponential as 0."""
ACTIVATE = {"silu": F.silu, "gelu_tanh": gelu_tanh, "sigmoid": torch.sigmoid}


@pytest.mark.parametrize(("size", "dtype", "activation"), combinations(SIZES, NARROW, ACTIVATE))
def test_gates_are_rounded_once(size, dtype, activation):
    halves = select_gate(CUDA, dtype, size, activation)
    pair = select_pair_gate(CUDA, dtype, size, activation)
    for rows in ROWS:
        both = normal(rows, 2 * size, dtype=dtype, spread=8)
        gate, other = both.chunk(2, dim=-1)
        expected = ACTIVATE[activation](gate.double()) * other.double()
        assert_rounded_once(halves(both), expected, max(NOTHING, torch.finfo(dtype).smallest_normal))
        assert torch.equal(pair(gate, other), halves(both))


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"), combinations([1, 5, 36, 80], [64, 96, 128, 256], NARROW)
)
def test_heads_are_turned_and_rounded_once(heads, head_dim, dtype):
    rotation = select_rotation(CUDA, dtype, heads, head_dim)
    for rows in ROWS:
        x = normal(rows, heads + 2, head_dim, dtype=dtype)[:, :heads]
        angles = normal(rows, 2, 1, head_dim, dtype=dtype)
        cos, sin = angles.double().unbind(1)
        expected = x.double() * cos + x.double().roll(head_dim // 2, -1) * sin
        assert_rounded_once(rotation(x, angles), expected, 1e-5)
