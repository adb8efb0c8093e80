"""Products with quantised weights are those of the dense weights, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import llvmlite.binding as llvm
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu import integers, jit, products, trials
from nbengine.kernels.cpu.codegen import Code
from nbengine.kernels.cpu.integers import QuadProduct
from nbengine.kernels.cpu.jit import Processor, host_processor
from nbengine.kernels.cpu.quantized import CpuProducts, share_size
from nbengine.kernels.cpu.records import EIGHT_BITS
from nbengine.kernels.quantized import MICRO_LEVELS, Format, dense, pack
from tests.kernels.quantized_weights import ALL_FORMATS, FORMAT_NAMES, random_parts, rounded
from tests.support.thorough import amount

BITS = (8, 16)
"""The bits of rounded activations."""
ERROR = 1e-6
"""A sum in float32 may be off by this part of what the sizes of its terms add up to."""
LACKING: dict[QuadProduct, tuple[str, ...]] = {
    # These are emulated.
    QuadProduct.I8MM: (),
    QuadProduct.DOTPROD: (),
    # AVX-512 has these instructions, too.
    QuadProduct.VNNI_256: (),
    QuadProduct.AVX2: ("avx512", "avxvnni"),
    QuadProduct.PORTABLE: ("avx512", "avxvnni", "avx2", "i8mm", "dotprod"),
}
"""The features, by the beginnings of their names, without which each kind is tried."""


def assert_product(form_name: str, x: torch.Tensor, rows: int, seed: int) -> None:
    form = ALL_FORMATS[form_name]
    assert_equal_to_dense(form, pack(form, random_parts(form, rows, x.shape[1], seed)), x, rows)


def assert_equal_to_dense(form: Format, data: torch.Tensor, x: torch.Tensor, rows: int) -> None:
    weight = dense(form, data, rows).double().T
    for bits in BITS:
        found, levels = CpuProducts().linear(x, form, data, rows, bits), rounded(x, bits)
        assert not found.isnan().any()
        error = (found.double() - levels @ weight).abs()
        assert (error <= ERROR * (levels.abs() @ weight.abs()).max()).all()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@settings(max_examples=amount(12, thorough=800))
@given(
    num_rows=st.integers(1, 20),
    out_features=st.integers(1, 70),
    cells=st.integers(1, 3),
    seed=st.integers(0, 10**9),
)
def test_products_are_those_of_the_dense_weight(
    name: str, num_rows: int, out_features: int, cells: int, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, cells * ALL_FORMATS[name].columns, generator=chance)
    assert_product(name, x, out_features, seed)


@pytest.fixture
def on_processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[QuadProduct], None]:
    def take(kind: QuadProduct) -> None:
        host = host_processor()
        features = llvm.FeatureMap(
            {name: has and not name.startswith(LACKING[kind]) for name, has in host.features.items()}
        )
        older = Processor(host.name, features)
        for module in (jit, trials):
            monkeypatch.setattr(module, "host_processor", lambda: older)
        monkeypatch.setattr(QuadProduct, "best", lambda processor: kind)
        monkeypatch.setattr(products, "_compile_multiply", cache(products._compile_multiply.__wrapped__))

    return take


def assert_largest_products(name: str) -> None:
    """Multiply the largest levels, in every second row, and none in the others, with the largest activations."""
    form = ALL_FORMATS[name]
    parts = random_parts(form, 32, 256, 7)
    parts.levels[::2] = MICRO_LEVELS.index(form.largest) if form.is_micro else form.largest
    parts.levels[1::2] = 0
    data = pack(form, parts)
    for sign in (1.0, -1.0):
        assert_equal_to_dense(form, data, torch.full((8, 256), sign), 32)


def skip_without(kind: QuadProduct) -> None:
    has = host_processor().features.get
    if kind is QuadProduct.VNNI_256 and not has("avx512vnni"):
        pytest.skip("this processor has no VNNI")
    if kind is QuadProduct.AVX2 and not has("avx2"):
        pytest.skip("this processor has no AVX2")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (QuadProduct.VNNI_256, ("q4_1", "q8_0", "mxfp4")),
        (QuadProduct.AVX2, ("q4_0", "q5_1", "q6_k", "q8_0", "q8_z", "mxfp4")),
        (QuadProduct.PORTABLE, ("q5_k", "q8_0", "q4_z", "mxfp4")),
    ],
    ids=str,
)
def test_other_instructions_give_the_same_sums(
    kind: QuadProduct, names: Sequence[str], on_processor: Callable[[QuadProduct], None]
) -> None:
    skip_without(kind)
    on_processor(kind)
    chance = torch.Generator().manual_seed(3)
    for name in names:
        for num_rows in (1, 3, 8):
            x = torch.randn(num_rows, 512, generator=chance)
            # The integers are exact everywhere; the sums of spans are rounded once more where nothing fuses.
            assert_product(name, x, 37, num_rows)
        assert_largest_products(name)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_largest_levels_and_activations_do_not_overflow(name: str) -> None:
    assert_largest_products(name)


ARM = {QuadProduct.I8MM: "usdot", QuadProduct.DOTPROD: "sdot"}


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "mxfp4"])
@pytest.mark.parametrize("kind", ARM)
def test_arms_instructions_get_what_they_multiply_rightly(
    monkeypatch: pytest.MonkeyPatch,
    on_processor: Callable[[QuadProduct], None],
    kind: QuadProduct,
    name: str,
) -> None:
    """Each instruction is replaced by what Arm's manual says of it; all code around it is that for Arm."""
    own, used = integers._intrinsic, set()

    def emulated(code: Code, called: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
        b, words = code.builder, ir.VectorType(ir.IntType(32), 16)
        if called == "llvm.aarch64.neon.tbl1.v16i8":
            return own(code, "llvm.x86.ssse3.pshuf.b.128", result, arguments)
        if not called.startswith("llvm.aarch64.neon"):
            return own(code, called, result, arguments)
        instruction = called.split(".")[3]
        used.add(instruction)
        total, first, second = arguments
        widen = b.zext if instruction == "usdot" else b.sext
        product = b.mul(widen(first, words), b.sext(second, words))
        for place in range(4):
            lanes = ir.VectorType(ir.IntType(32), 4)(list(range(place, 16, 4)))
            total = b.add(total, b.shuffle_vector(product, product, lanes))
        return total

    on_processor(kind)
    monkeypatch.setattr(integers, "_intrinsic", emulated)
    monkeypatch.setattr(jit, "_store_of", lambda module: None)
    chance = torch.Generator().manual_seed(1)
    for num_rows in (1, 3, 8):
        assert_product(name, torch.randn(num_rows, 512, generator=chance), 37, num_rows)
    assert_largest_products(name)
    assert used == {ARM[kind]}


@pytest.mark.parametrize(("kind", "instruction"), ARM.items())
def test_arms_instructions_are_known_to_the_compiler(kind: QuadProduct, instruction: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    products._define_multiply(module, ALL_FORMATS["mxfp4"], EIGHT_BITS, kind, False)
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    feature = {QuadProduct.I8MM: "+i8mm", QuadProduct.DOTPROD: "+dotprod"}[kind]
    machine = target.create_target_machine(cpu="generic", features=feature)
    text = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert {instruction, "tbl"} <= {line.split()[0] for line in text.splitlines() if line.strip()}


def test_the_choice_goes_by_the_processors_features() -> None:
    def best(*names: str) -> QuadProduct:
        return QuadProduct.best(Processor("any", llvm.FeatureMap(dict.fromkeys(names, True))))

    assert best("avx2", "avx512f", "avx512vnni") is QuadProduct.VNNI_512
    assert best("avx2", "avxvnni") is QuadProduct.VNNI_256
    assert best("avx2", "avx512f") is QuadProduct.AVX2
    assert best("neon", "dotprod", "i8mm") is QuadProduct.I8MM
    assert best("neon", "dotprod") is QuadProduct.DOTPROD
    assert best() is QuadProduct.PORTABLE


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q5_k", "q6_k", "q4_z", "mxfp4"])
@pytest.mark.usefixtures("threads")
def test_a_rows_result_depends_neither_on_other_rows_nor_on_threads(name: str, bits: int) -> None:
    form = ALL_FORMATS[name]
    data = pack(form, random_parts(form, 100, 512, 11))
    count = 2 * products.BLOCK + 13
    x = torch.randn(count, 512, generator=torch.Generator().manual_seed(5))
    torch.set_num_threads(1)
    alone = torch.cat([CpuProducts().linear(x[i : i + 1], form, data, 100, bits) for i in range(len(x))])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        together = CpuProducts()
        for start, stop in ((0, count), (3, 20), (5, 7), (6, 6 + products.BLOCK)):
            found = together.linear(x[start:stop], form, data, 100, bits)
            assert torch.equal(found.view(torch.int32), alone[start:stop].view(torch.int32))


@pytest.mark.parametrize("threads_wanted", [1, 2, 3, 8])
def test_no_thread_gets_more_tiles_than_it_must(threads_wanted: int) -> None:
    for count in (0, 1, 2, 5, 36, 48, 60, 97, 3072):
        size = share_size(count, threads_wanted)
        items = -(-count // size)
        most = -(-items // threads_wanted) * size
        coarse = -(-max(1, count) // (4 * threads_wanted))
        assert 1 <= size <= coarse
        assert most <= -(-count // (threads_wanted * coarse)) * coarse
        # The sizes of the default model's layers come out even on two cores.
        if threads_wanted == 2 and count in (36, 48, 60, 3072):
            assert most == count // 2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row_alone(poison: float, bits: int) -> None:
    form = ALL_FORMATS["q4_1"]
    data = pack(form, random_parts(form, 40, 64, 1))
    x = torch.ones(9, 64)
    x[4, 37] = poison
    found = CpuProducts().linear(x, form, data, 40, bits)
    assert found[4].isnan().all()
    assert found[torch.arange(9) != 4].isfinite().all()


def test_a_row_of_zeros_gives_zeros() -> None:
    form = ALL_FORMATS["q5_1"]
    data = pack(form, random_parts(form, 17, 64, 1))
    assert torch.equal(CpuProducts().linear(torch.zeros(3, 64), form, data, 17), torch.zeros(3, 17))


def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    form = ALL_FORMATS["q8_0"]
    data = pack(form, random_parts(form, 33, 64, 1))
    wide = torch.full((6, 96), float("nan"))
    wide[:, :64] = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    kernels = CpuProducts()
    expected = kernels.linear(wide[:, :64].contiguous(), form, data, 33)
    assert torch.equal(kernels.linear(wide[:, :64], form, data, 33), expected)


def test_x_of_another_type_or_width_is_refused() -> None:
    form = ALL_FORMATS["q4_0"]
    data = pack(form, random_parts(form, 16, 64, 1))
    for x in (torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 96)):
        with pytest.raises(InvalidArgumentError, match=r"x must be float32 with 64 columns"):
            CpuProducts().linear(x, form, data, 16)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rows_are_those_of_the_dense_weight(name: str) -> None:
    form = ALL_FORMATS[name]
    data = pack(form, random_parts(form, 50, 512, 2))
    ids = torch.tensor([49, 0, 17, 17, 31, 16, 15])
    found = CpuProducts().rows(ids, form, data)
    torch.testing.assert_close(found, dense(form, data, 50)[ids], rtol=1e-6, atol=1e-6)


def test_no_rows_are_none() -> None:
    form = ALL_FORMATS["q4_1"]
    data = pack(form, random_parts(form, 16, 64, 1))
    assert CpuProducts().rows(torch.empty(0, dtype=torch.int64), form, data).shape == (0, 64)
    assert CpuProducts().linear(torch.empty(0, 64), form, data, 16).shape == (0, 16)
