"""The compiled functions of rows are those of torch in float64, rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.row_calls import (
    CpuDeltaGates,
    CpuGate,
    CpuGroupNorm,
    CpuPairGate,
    CpuRMSNorm,
    CpuRotation,
    CpuSigmoidScale,
    CpuSoftCap,
    CpuSoftplus,
    RowFunction,
)
from nbengine.kernels.cpu.row_functions import compile_rows
from nbengine.kernels.row_kernels import select_gate, select_rms_norm, select_rotation
from tests.support.thorough import amount

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=amount(12, thorough=800))
@given(rows=st.integers(1, 70), size=st.sampled_from([16, 64, 576]), seed=st.integers(0, 10**9))
def test_rows_are_normalised_and_rounded_once(dtype: torch.dtype, rows: int, size: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, generator=chance).to(dtype)
    x = (
        torch.randn(rows, size, generator=chance) * 10 ** (torch.rand(rows, 1, generator=chance) * 4 - 2)
    ).to(dtype)
    found = CpuRMSNorm(weight, EPS)(x)
    assert found.dtype is dtype
    # Half of the last place of the result, and a little for the sums in float32.
    places = torch.finfo(dtype).eps / 2 * 1.001 + 4e-7
    torch.testing.assert_close(found.double(), expected(x, weight), rtol=places, atol=1e-7)


def test_the_last_of_several_dimensions_is_normalised_wherever_the_rows_lie() -> None:
    chance = torch.Generator().manual_seed(1)
    weight = torch.randn(64, generator=chance).bfloat16()
    x = torch.randn(5, 3, 96, generator=chance).bfloat16()[:, 1:, :64]
    found = CpuRMSNorm(weight, EPS)(x)
    assert found.shape == x.shape
    assert found.is_contiguous()
    assert torch.equal(found, CpuRMSNorm(weight, EPS)(x.contiguous()))
    torch.testing.assert_close(found.double(), expected(x, weight), rtol=2**-8, atol=1e-7)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = CpuRMSNorm(torch.ones(64).bfloat16(), EPS)
    assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))
    x[7, 3] = float("nan")
    assert norm(x)[7].isnan().all()
    assert not norm(x)[torch.arange(40) != 7].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=amount(12, thorough=800))
@given(rows=st.integers(1, 40), size=st.sampled_from([16, 64, 1536]), seed=st.integers(0, 10**9))
def test_gates_are_multiplied_and_rounded_once(dtype: torch.dtype, rows: int, size: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, 2 * size, generator=chance) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    found = CpuGate(size, dtype, "silu")(x)
    # Where a gate is far below 0, the product may be below the type's normal numbers.
    smallest = float(torch.finfo(dtype).smallest_normal)
    # 2**x is exact to two places, of a result that is at most half of the error.
    places = torch.finfo(dtype).eps / 2 * 1.01 + 1e-6
    torch.testing.assert_close(found.double(), F.silu(gate) * up, rtol=places, atol=smallest)
    found = CpuGate(size, dtype, "gelu_tanh")(x)
    # Far below 0 the activation is the difference of numbers that are almost equal.
    absolute = float(gate.abs().max() * up.abs().max()) * 2**-22
    torch.testing.assert_close(
        found.double(), F.gelu(gate, approximate="tanh") * up, rtol=places, atol=absolute
    )
    whole = CpuGate(2 * size, dtype, "relu2")(x)
    torch.testing.assert_close(whole.double(), F.relu(x.double()).square(), rtol=places, atol=smallest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=amount(12, thorough=800))
@given(
    rows=st.integers(1, 40),
    heads=st.integers(1, 5),
    head_dim=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 10**9),
)
def test_heads_are_turned_and_rounded_once(
    dtype: torch.dtype, rows: int, heads: int, head_dim: int, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    # As in a step: the heads to turn are the first of those of a row.
    x = torch.randn(rows, heads + 2, head_dim, generator=chance).to(dtype)[:, :heads]
    angles = torch.randn(rows, 2, 1, head_dim, generator=chance).to(dtype)
    cos, sin = angles.double().unbind(1)
    expected = x.double() * cos + x.double().roll(head_dim // 2, -1) * sin
    found = CpuRotation(heads, head_dim, dtype)(x, angles)
    assert found.is_contiguous()
    # Two terms may cancel: then the error is that of the terms in float32.
    places = torch.finfo(dtype).eps / 2 * 1.001 + 1e-7
    torch.testing.assert_close(found.double(), expected, rtol=places, atol=1e-5)


def test_other_devices_and_odd_sizes_are_left_to_torch() -> None:
    wide, narrow = torch.float32, torch.bfloat16
    assert select_rms_norm(torch.ones(64), EPS, wide) is not None
    assert select_rms_norm(torch.ones(64), EPS, narrow) is None
    assert select_rms_norm(torch.ones(64, dtype=narrow, device="meta"), EPS, narrow) is None
    assert select_rms_norm(torch.ones(72, dtype=narrow), EPS, narrow) is None
    assert select_rms_norm(torch.ones(64, dtype=narrow), EPS, narrow) is not None
    cpu = torch.device("cpu")
    assert select_gate(torch.device("meta"), torch.bfloat16, 64, "silu") is None
    assert select_gate(cpu, torch.bfloat16, 72, "silu") is None
    assert select_gate(cpu, torch.bfloat16, 64, "relu") is None
    assert select_gate(cpu, torch.bfloat16, 64, "silu") is not None
    assert select_rotation(torch.device("meta"), torch.bfloat16, 2, 64) is None
    assert select_rotation(cpu, torch.bfloat16, 2, 48) is None
    assert select_rotation(cpu, torch.bfloat16, 2, 64) is not None


@settings(max_examples=amount(12, thorough=800))
@given(rows=st.integers(1, 40), heads=st.sampled_from([2, 16, 21, 48]), seed=st.integers(0, 10**9))
def test_the_gates_of_the_delta_rule_are_exact_to_some_places(rows: int, heads: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    spread = torch.tensor([0.1, 3, 40])[torch.randint(3, (rows, 1), generator=chance)]
    projected = torch.randn(rows, 2 * heads, generator=chance) * spread
    beta, step = projected.split(heads, dim=1)
    weights = torch.randn(2, heads, generator=chance) * 2
    decay, beta_found = CpuDeltaGates(heads)(step, beta, weights)
    bias, log = weights.double()
    rounded = (step + weights[0]).double()
    torch.testing.assert_close((step.double() + bias), rounded, rtol=1e-6, atol=1e-5)
    expected = F.softplus(rounded, threshold=1e9) * -log.exp()
    torch.testing.assert_close(decay.double(), expected, rtol=2e-5, atol=1e-36)
    torch.testing.assert_close(beta_found.double(), beta.double().sigmoid(), rtol=2e-5, atol=1e-36)


def test_gates_that_are_not_numbers_stay_so() -> None:
    step = torch.tensor([[torch.nan, 1.0], [torch.inf, -torch.inf]])
    decay, beta = CpuDeltaGates(2)(step, step, torch.zeros(2, 2))
    assert decay.isnan().tolist() == [[True, False], [False, False]]
    assert decay[1].tolist() == [-torch.inf, 0]
    assert beta.isnan().tolist() == [[True, False], [False, False]]
    assert beta[1].tolist() == [1, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=amount(12, thorough=400))
@given(rows=st.integers(1, 40), seed=st.integers(0, 10**9))
def test_a_gate_beside_what_it_gates_is_rounded_once(dtype: torch.dtype, rows: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    gate, other = ((torch.randn(rows, 96, generator=chance) * 4).to(dtype)[:, 16:80] for _ in range(2))
    found = CpuPairGate(64, dtype, "sigmoid")(gate, other)
    places = torch.finfo(dtype).eps / 2 * 1.01 + 1e-6
    expected = gate.double().sigmoid() * other.double()
    torch.testing.assert_close(found.double(), expected, rtol=places, atol=1e-6)


COMBINED = {
    "add": torch.add,
    "multiply": torch.mul,
    "divide": torch.div,
    "at_least": torch.maximum,
    "at_most": torch.minimum,
}


@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize("size", [1, 16, 45, 99])
def test_two_rows_of_any_size_are_combined_as_torch_does(name: str, size: int) -> None:
    chance = torch.Generator().manual_seed(size)
    x, other = torch.randn(19, size, generator=chance), torch.randn(size, generator=chance)
    x[3, size // 2], x[4, 0], x[5, size - 1] = torch.nan, torch.inf, -torch.inf
    output = torch.full((19, size), 7.0)
    RowFunction(compile_rows(name, size, Element.FLOAT32)).run(x, output, other.data_ptr())
    torch.testing.assert_close(output, COMBINED[name](x, other), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [16, 96])
def test_each_row_is_multiplied_by_a_number_of_its_own(size: int) -> None:
    chance = torch.Generator().manual_seed(size)
    x, factors = torch.randn(19, size, generator=chance), torch.randn(19, 3, generator=chance)
    x[3, 5], factors[4, 0] = torch.nan, torch.inf
    output = torch.full((19, size), 7.0)
    function = compile_rows("scale", size, Element.FLOAT32)
    RowFunction(function).run(x, output, factors.data_ptr(), factors.stride(0) * 4)
    torch.testing.assert_close(output, x * factors[:, :1], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=amount(12, thorough=800))
@given(rows=st.integers(1, 40), size=st.integers(1, 70), seed=st.integers(0, 10**9))
def test_softplus_of_a_sum_is_exact_to_some_places(rows: int, size: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    spread = torch.tensor([0.1, 3, 40])[torch.randint(3, (rows, 1), generator=chance)]
    x = (torch.randn(rows, size + 3, generator=chance) * spread)[:, 3:]
    added = torch.randn(size, generator=chance)
    found = CpuSoftplus(size)(x, added)
    expected = F.softplus((x + added).double(), threshold=1e9)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-36)
    x[0] = torch.nan
    assert CpuSoftplus(size)(x, added)[0].isnan().all()


@settings(max_examples=amount(12, thorough=800))
@given(rows=st.integers(1, 20), size=st.integers(1, 200), cap=st.floats(0.5, 60), seed=st.integers(0, 10**9))
def test_a_soft_cap_is_exact_to_some_places(rows: int, size: int, cap: float, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    spread = torch.tensor([0.1, 3, 400])[torch.randint(3, (rows, 1), generator=chance)]
    x = torch.randn(rows, size, generator=chance) * spread
    expected = (x.double() / cap).tanh() * cap
    found = CpuSoftCap(size, cap)(x.clone())
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-30)
    x[0], x[-1, -1] = torch.nan, torch.inf
    found = CpuSoftCap(size, cap)(x)
    assert found[0].isnan().all() if rows > 1 else found[0, :-1].isnan().all()
    assert found[-1, -1].item() == pytest.approx(cap, rel=1e-6)


@settings(max_examples=amount(12, thorough=800))
@given(
    rows=st.integers(1, 20), heads=st.integers(1, 4), kept=st.sampled_from([0, 16]), seed=st.integers(0, 99)
)
def test_neighbours_are_turned_as_torch_does(rows: int, heads: int, kept: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    x, angles = torch.randn(rows, heads, 32 + kept, generator=chance), torch.randn(rows, 2, 1, 32)
    output = torch.empty_like(x)
    function = compile_rows("rotate_pairs", heads, Element.FLOAT32, 32 + kept, turned=32)
    RowFunction(function).run(x, output, angles.data_ptr(), 2 * 32 * 4)
    turned, rest = x.split((32, kept), dim=2)
    partner = turned.unflatten(2, (16, 2)).flip(-1).flatten(2)
    expected = turned * angles[:, 0] + partner * angles[:, 1]
    assert torch.equal(output, torch.cat((expected, rest), dim=2))


@settings(max_examples=amount(12, thorough=800))
@given(
    rows=st.integers(1, 40), groups=st.integers(1, 5), size=st.sampled_from([16, 48]), seed=st.integers(0, 99)
)
def test_each_group_of_a_row_is_normalised_with_its_own_weights(
    rows: int, groups: int, size: int, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(groups * size, generator=chance)
    x = torch.randn(rows, groups, size, generator=chance)
    x *= 10 ** (torch.rand(rows, groups, 1, generator=chance) * 4 - 2)
    found = CpuGroupNorm(weight, groups, EPS)(x.flatten(1)).view(x.shape)
    normalised = F.rms_norm(x.double(), (size,), eps=EPS) * weight.view(groups, size).double()
    torch.testing.assert_close(found.double(), normalised, rtol=1e-6, atol=1e-7)


@settings(max_examples=amount(12, thorough=800))
@given(rows=st.integers(1, 40), size=st.sampled_from([16, 96]), seed=st.integers(0, 10**9))
def test_rows_are_multiplied_with_sigmoid_of_their_own_number(rows: int, size: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=chance)
    scores = torch.randn(rows, 16, generator=chance) * 5
    expected = x.double() * scores[:, :1].double().sigmoid()
    found = CpuSigmoidScale(size)(x, scores)
    assert found is x
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=amount(12, thorough=400))
@given(rows=st.integers(1, 40), limit=st.sampled_from([0.8, 7.0]), seed=st.integers(0, 10**9))
def test_clamped_gates_are_rounded_once(dtype: torch.dtype, rows: int, limit: float, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, 96, generator=chance) * 4).to(dtype)
    found = CpuGate(48, dtype, (1.702, limit))(x)
    gate, up = x.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    places = torch.finfo(dtype).eps / 2 * 1.01 + 1e-6
    expected = (1.702 * gate).sigmoid() * gate * (up + 1)
    torch.testing.assert_close(found.double(), expected, rtol=places, atol=1e-6)


def test_clamped_gates_that_are_not_numbers_stay_so() -> None:
    x = torch.zeros(3, 32)
    x[0, 3] = x[1, 16 + 5] = torch.nan
    found = CpuGate(16, torch.float32, (1.702, 7.0))(x).isnan()
    assert found.nonzero().tolist() == [[0, 3], [1, 5]]
