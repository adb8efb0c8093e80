"""Products with dense weights: right, and the same for a row whatever is beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nbengine.errors import InvalidArgumentError, NBEngineError
from nbengine.kernels.cpu import dense
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.dense import CpuDense, has_split_products
from nbengine.kernels.cpu.dense_parts import DenseKind, Instructions
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.jit import host_processor
from nbengine.kernels.dense_kernels import DenseProducts, select_dense, select_split
from nbengine.kernels.torch.dense import TiledProducts, tile_rows
from nbengine.models.layers.dense import dense_linear

CPU = torch.device("cpu")
NARROW = (torch.bfloat16, torch.float16)
COLUMNS = (1, 31, 33, 576, 1536)
OUTPUTS = (1, 15, 17, 960)
ROWS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 48, 64, 65, 70)
MOST = max(ROWS)

KINDS = [
    pytest.param(dtype, instructions, id=f"{instructions.value}-{str(dtype).removeprefix('torch.')}")
    for dtype in (*NARROW, torch.float32)
    for instructions in Instructions.of(host_processor(), ELEMENTS[dtype])
]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compare with float64: one rounding to the result's type, and those of float32 sums, of which there are up to six
    times as many, and what is left out, where numbers of float32 are divided into three."""
    roundings = x.shape[1] if weight.dtype is not torch.float32 else 6 * x.shape[1] + 4
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    allowed = exact.abs() * torch.finfo(found.dtype).eps / 2 + sizes * roundings * 2.0**-24 + 1e-6
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_results_are_those_of_float64_and_a_row_does_not_depend_on_the_others(
    dtype: torch.dtype, instructions: Instructions, columns: int
) -> None:
    products = CpuDense(instructions)
    for out_features in OUTPUTS:
        weight = numbers(out_features, columns, dtype=dtype)
        x, bias = numbers(MOST, columns, dtype=dtype, seed=1), numbers(out_features, dtype=dtype, seed=2)
        together = products.linear(x, weight, bias)
        check(together, x, weight, bias)
        check(products.linear(x, weight), x, weight, None)
        for rows in ROWS:
            assert torch.equal(products.linear(x[:rows], weight, bias), together[:rows])
            assert torch.equal(products.linear(x[-rows:], weight, bias), together[-rows:])


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_a_row_is_the_same_at_every_place(dtype: torch.dtype, instructions: Instructions) -> None:
    products, weight = CpuDense(instructions), numbers(33, 65, dtype=dtype)
    x = numbers(MOST, 65, dtype=dtype, seed=1)
    row = numbers(1, 65, dtype=dtype, seed=2)
    alone = products.linear(row, weight)
    for place in range(MOST):
        beside = x.clone()
        beside[place] = row[0]
        assert torch.equal(products.linear(beside, weight)[place], alone[0])


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
@pytest.mark.usefixtures("one_thread")
def test_threads_and_the_cutting_of_rows_into_blocks_change_nothing(
    dtype: torch.dtype, instructions: Instructions
) -> None:
    products, weight = CpuDense(instructions), numbers(100, 8192, dtype=dtype)
    x = numbers(150, 8192, dtype=dtype, seed=1)
    torch.set_num_threads(1)
    expected = products.linear(x, weight)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(products.linear(x, weight), expected)
        assert torch.equal(products.linear(x[140:141], weight), expected[140:141])


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_rows_of_float32_are_rounded_to_bfloat16_alone_and_their_results_are_not(
    dtype: torch.dtype, instructions: Instructions
) -> None:
    products, weight = CpuDense(instructions), numbers(40, 100, dtype=dtype)
    x, bias = numbers(MOST, 100, seed=1), numbers(40, seed=2)
    found = products.linear(x, weight, bias)
    assert found.dtype is torch.float32
    rounded = x.to(torch.bfloat16).float() if dtype is torch.bfloat16 else x
    check(found, rounded, weight, bias)
    assert torch.equal(found, products.linear(rounded, weight, bias))
    assert torch.equal(found[7:8], products.linear(x[7:8], weight, bias))
    narrow = products.linear(x.to(dtype), weight)
    assert torch.equal(products.linear(x.to(dtype).float(), weight).to(dtype), narrow)


def test_rows_beyond_float16_are_multiplied_with_weights_of_it() -> None:
    weight, x = numbers(40, 100, dtype=torch.float16), numbers(5, 100, seed=1) * 1e6
    check(CpuDense().linear(x, weight), x, weight, None)


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_what_is_no_number_stays_in_its_row_and_column(
    dtype: torch.dtype, instructions: Instructions
) -> None:
    products, weight = CpuDense(instructions), numbers(35, 67, dtype=dtype)
    x = numbers(20, 67, dtype=dtype, seed=1)
    expected = products.linear(x, weight)
    x[3, 66], x[5, 0], weight[34, 66] = math.nan, math.inf, math.nan
    found = products.linear(x, weight)
    assert found[3].isnan().all()
    assert found[:, 34].isnan().all()
    # Infinity less itself, which is what remains of it beside its high part, is no number.
    is_split = instructions is Instructions.SPLITS
    assert (found[5, :34].isnan() if is_split else found[5, :34].abs() == math.inf).all()
    others = [row for row in range(20) if row not in (3, 5)]
    assert torch.equal(found[others, :34], expected[others, :34])


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_nothing_is_read_or_written_beside_the_operands(
    dtype: torch.dtype, instructions: Instructions
) -> None:
    products, nan = CpuDense(instructions), math.nan
    weight, x, out = (torch.full((size, 80), nan, dtype=dtype) for size in (19, 5, 5))
    weight[1:18, 4:71], x[1:4, 4:71] = numbers(17, 67, dtype=dtype), numbers(3, 67, dtype=dtype, seed=1)
    out[:] = 7
    part = products.linear(x[1:4, 4:71], weight[1:18, 4:71], out=out[1:4, 3:20])
    assert torch.equal(part, products.linear(x[1:4, 4:71].contiguous(), weight[1:18, 4:71].contiguous()))
    assert (out[1:4, 3:20] == part).all()
    out[1:4, 3:20] = 7
    assert (out == 7).all()


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_any_layout_of_x_is_taken(dtype: torch.dtype, instructions: Instructions) -> None:
    products, weight = CpuDense(instructions), numbers(20, 48, dtype=dtype)
    x = numbers(48, 9, dtype=dtype, seed=1).t()
    assert torch.equal(products.linear(x, weight), products.linear(x.contiguous(), weight))
    assert products.linear(x[:0], weight).shape == (0, 20)
    assert torch.equal(products.linear(x[:, :0], weight[:, :0]), torch.zeros(9, 20, dtype=dtype))


def test_operands_that_do_not_fit_are_refused() -> None:
    products, weight = CpuDense(), numbers(20, 48, dtype=torch.bfloat16)
    x = numbers(3, 48, dtype=torch.bfloat16)
    wrong: list[tuple[Tensor, Tensor, Tensor | None]] = [
        (x[:, 1:], weight, None),
        (x.half(), weight, None),
        (x, weight.float(), None),
        (x, weight, torch.zeros(20)),
        (x, weight, torch.zeros(19, dtype=torch.bfloat16)),
    ]
    for arguments in wrong:
        with pytest.raises(InvalidArgumentError):
            products.linear(*arguments)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kind", [CpuDense, TiledProducts])
def test_heads_have_matrices_of_their_own(kind: type[DenseProducts], dtype: torch.dtype) -> None:
    products, x = kind(), numbers(MOST, 3, 24, dtype=dtype)
    lying, standing = numbers(3, 24, 40, dtype=dtype, seed=1), numbers(3, 40, 24, dtype=dtype, seed=2)
    for weight in (lying, standing.transpose(1, 2)):
        together = products.by_head(x, weight)
        for head in range(3):
            check(together[:, head], x[:, head], weight[head].t(), None)
        for rows in (1, 2, 33):
            assert torch.equal(products.by_head(x[:rows], weight), together[:rows])


@pytest.mark.parametrize("dtype", NARROW)
def test_torch_in_tiles_computes_a_row_alike_in_every_company(dtype: torch.dtype) -> None:
    assert tile_rows(dtype) >= 1
    products = TiledProducts()
    for columns in (33, 576, 1536):
        weight, bias = numbers(96, columns, dtype=dtype), numbers(96, dtype=dtype, seed=2)
        x = numbers(MOST, columns, dtype=dtype, seed=1)
        together = products.linear(x, weight, bias)
        torch.testing.assert_close(together, torch.nn.functional.linear(x, weight, bias))
        for rows in (1, 2, 8, 31, 33, 64):
            assert torch.equal(products.linear(x[-rows:], weight, bias), together[-rows:])
    assert products.linear(x[:0], weight).shape == (0, 96)


def test_one_row_at_a_time_where_places_in_a_tile_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear

    def uneven(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = linear(x, weight, bias)
        found[1:] *= 1.5
        return found

    monkeypatch.setattr(torch.nn.functional, "linear", uneven)
    assert tile_rows.__wrapped__(torch.bfloat16) == 1


def test_torch_multiplies_in_tiles_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise NBEngineError("no code generator")

    monkeypatch.setattr(CpuDense, "warm_up", refuse)
    assert isinstance(select_dense.__wrapped__(CPU, torch.bfloat16), TiledProducts)
    assert "no code generator" in caplog.text


def test_parts_of_float32_lose_no_bits_over_all_sizes_of_numbers() -> None:
    """Sums of one number times a power of two are exact if, and only if, all parts of the number are there."""
    products = CpuDense()
    x = numbers(MOST, 64) * 10.0 ** torch.arange(-12, 20).repeat(2)
    weight = torch.eye(64) * 2.0 ** torch.arange(-20, 12).repeat(2)
    assert torch.equal(products.linear(x, weight), x * weight.diagonal())
    assert torch.equal(products.linear(weight, x), x.t() * weight.diagonal()[:, None])


def test_rows_of_float32_are_as_near_to_the_exact_ones_as_the_librarys() -> None:
    products, weight = CpuDense(), numbers(960, 576)
    x = numbers(MOST, 576, seed=1)
    exact = x.double() @ weight.double().T
    own, library = (
        (found.double() - exact).square().mean()
        for found in (products.linear(x, weight), torch.nn.functional.linear(x, weight))
    )
    assert own <= 2 * library


@pytest.mark.skipif(not has_split_products(), reason="the processor has no tiles of bfloat16")
def test_splits_are_chosen_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_split(torch.device("cuda")) is None
    products = select_split(CPU)
    assert products is not None
    taken: list[int] = []
    linear = products.linear

    def noted(x: Tensor, *others: Any) -> Tensor:
        taken.append(len(x))
        return linear(x, *others)

    monkeypatch.setattr(products, "linear", noted)
    for columns, rows, is_split in ((64, 7, False), (64, 8, True), (2080, 64, True), (2080, 65, False)):
        x, weight = numbers(1, rows, columns), numbers(40, columns, seed=1)
        found = dense_linear(x, weight)
        assert found.shape == (1, rows, 40)
        check(found[0], x[0], weight, None)
        assert taken == ([rows] if is_split else [])
        taken.clear()


@pytest.mark.parametrize("refused", ["nothing is compiled", "the tiles compute wrongly"])
def test_splits_give_way_to_torch_where_they_cannot_be_used(
    refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise NBEngineError("no code generator")

    def fall_back(*_: object) -> tuple[DenseKind, None, int]:
        return DenseKind(Instructions.WIDENED, Element.FLOAT32, Element.FLOAT32), None, 1

    # The choice is the same on processors without tiles.
    monkeypatch.setattr(Instructions, "of", lambda *_: [Instructions.SPLITS, Instructions.WIDENED])
    is_compiled = refused != "nothing is compiled"
    monkeypatch.setattr(dense, "compile_dense", fall_back if is_compiled else refuse)
    assert select_split.__wrapped__(CPU) is None
    said = [] if is_compiled else ["products in float32 run through torch: no code generator"]
    assert caplog.messages == said


def test_the_dispatch_leaves_float32_and_other_devices_to_torch() -> None:
    assert select_dense(CPU, torch.float32) is None
    assert select_dense(torch.device("meta"), torch.bfloat16) is None
    assert select_dense(torch.device("cuda"), torch.bfloat16) is None
    for dtype in NARROW:
        products = select_dense(CPU, dtype)
        assert products is not None
        assert products.name == "cpu"
        assert products is select_dense(CPU, dtype)
    best, *_ = Instructions.of(host_processor(), ELEMENTS[torch.bfloat16])
    assert CpuDense().instructions == best.value
