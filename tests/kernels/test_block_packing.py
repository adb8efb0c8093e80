"""The packer of GGUF blocks writes what the reference makes of them, bit for bit, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu import block_packing, jit
from nbengine.kernels.cpu.block_packing import CpuBlockPacker, block_bytes
from nbengine.kernels.cpu.jit import Processor, host_processor
from nbengine.kernels.dispatch import select_block_packer
from nbengine.kernels.quantized import FORMATS, Levels, pack
from nbengine.models.checkpoints.gguf_levels import levels_of
from tests.support.thorough import amount, combinations

GARBAGE = 0xA5
GAP = 7
"""Bytes between tiles that are nobody's."""
HALVES = {"q6_k": (208,)} | {
    name: (0, 2) if form.has_minimum else (0,)
    for name, form in FORMATS.items()
    if name != "q6_k" and not form.is_micro
}
"""The places of float16 numbers in a block."""
NOT_FINITE = (0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7C01)

Blocks = NDArray[np.uint8]


def random_blocks(name: str, rows: int, cells: int, seed: int, most: int = 255) -> Blocks:
    shape = (rows, cells * block_bytes(FORMATS[name]))
    return np.random.default_rng(seed).integers(0, most + 1, shape, dtype=np.uint8)


def reference(name: str, blocks: Blocks, order: NDArray[np.int64] | None = None) -> tuple[Tensor, bool]:
    """The packed weight, and whether its scales are finite, by torch."""
    ordered = blocks if order is None else blocks[order]
    raw = torch.from_numpy(ordered.reshape(-1).copy())
    parts: Levels = levels_of(raw, Kind[name.upper()], len(blocks))
    scales = (parts.scales, parts.minima, parts.supers, parts.super_minima)
    if FORMATS[name].is_micro:
        return pack(FORMATS[name], parts), not (parts.scales == 255).any()
    return pack(FORMATS[name], parts), all(part is None or bool(part.isfinite().all()) for part in scales)


def packed(name: str, blocks: Blocks, order: NDArray[np.int64] | None = None) -> tuple[Tensor, bool]:
    """The same, by the packer, into memory full of garbage with gaps between its tiles."""
    form = FORMATS[name]
    tiles, cells, size = form.data_shape(len(blocks), blocks.shape[1] // block_bytes(form) * form.columns)
    memory = torch.full((tiles, cells * size + GAP), GARBAGE, dtype=torch.uint8)
    output = memory[:, : cells * size].view(tiles, cells, size)
    is_finite = CpuBlockPacker().pack(form, blocks, output, order)
    assert (memory[:, cells * size :] == GARBAGE).all()
    return output, is_finite


def same(found: tuple[Tensor, bool], expected: tuple[Tensor, bool]) -> bool:
    return torch.equal(found[0], expected[0]) and found[1] is expected[1]


@pytest.mark.parametrize("name", FORMATS)
def test_a_blocks_size_is_that_of_the_file_format(name: str) -> None:
    assert (FORMATS[name].columns, block_bytes(FORMATS[name])) == GGML_QUANT_SIZES[Kind[name.upper()]]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=amount(15, thorough=1200))
@given(
    rows=st.integers(1, 70),
    cells=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    most=st.sampled_from([255, 0x7B]),
    is_ordered=st.booleans(),
)
def test_packed_blocks_are_those_of_the_reference(
    name: str, rows: int, cells: int, seed: int, most: int, is_ordered: bool
) -> None:
    blocks = random_blocks(name, rows, cells, seed, most)
    order = np.random.default_rng(seed).permutation(rows) if is_ordered else None
    assert same(packed(name, blocks, order), reference(name, blocks, order))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=amount(12, thorough=400))
@given(data=st.data(), filling=st.integers(0, 255), byte=st.integers(0, 255))
def test_a_byte_that_differs_from_all_others_gets_to_its_place(
    name: str, data: st.DataObject, filling: int, byte: int
) -> None:
    blocks = np.full((18, 2 * block_bytes(FORMATS[name])), filling, np.uint8)
    blocks[data.draw(st.integers(0, 17)), data.draw(st.integers(0, blocks.shape[1] - 1))] = byte
    assert same(packed(name, blocks), reference(name, blocks))


def test_every_exponent_that_is_no_number_is_noticed() -> None:
    size = block_bytes(FORMATS["mxfp4"])
    for row in range(17):
        for cell in range(2):
            blocks = random_blocks("mxfp4", 17, 2, row, 0xFE)
            assert packed("mxfp4", blocks)[1]
            blocks[row, cell * size] = 0xFF
            assert not packed("mxfp4", blocks)[1]


@pytest.mark.parametrize("name", HALVES)
def test_every_scale_that_is_not_finite_is_noticed(name: str) -> None:
    size = block_bytes(FORMATS[name])
    for row in range(17):
        for cell in range(2):
            for number, place in enumerate(HALVES[name]):
                blocks = random_blocks(name, 17, 2, row, 0x7B)
                assert packed(name, blocks)[1]
                wrong = NOT_FINITE[(row + cell + number) % len(NOT_FINITE)]
                first = cell * size + place
                blocks[row, first : first + 2] = wrong & 255, wrong >> 8
                assert not packed(name, blocks)[1]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_lie_apart_are_read_where_they_are(name: str) -> None:
    wide = random_blocks(name, 37, 4, 5)
    some = wide[::3, : 2 * block_bytes(FORMATS[name])]
    assert same(packed(name, some), reference(name, np.ascontiguousarray(some)))


def test_nothing_beyond_the_last_block_is_read() -> None:
    # The page behind the blocks cannot be read: to read there ends a process.
    program = """
import ctypes, mmap, numpy as np, torch
from nbengine.kernels.cpu.block_packing import CpuBlockPacker, block_bytes
from nbengine.kernels.quantized import FORMATS
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
whole = np.frombuffer(memory, np.uint8)
protect = ctypes.CDLL(None).mprotect
assert protect(ctypes.c_void_p(whole.ctypes.data + page), ctypes.c_size_t(page), 0) == 0
for form in FORMATS.values():
    size = block_bytes(form)
    blocks = whole[page - 17 * size : page].reshape(17, size)
    output = torch.empty(form.data_shape(17, form.columns), dtype=torch.uint8)
    assert CpuBlockPacker().pack(form, blocks, output)
print("all read")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all read\n"), done.stderr


def test_threads_pack_at_the_same_time() -> None:
    weights = [(name, random_blocks(name, 300 + seed, 4, seed)) for seed in range(3) for name in FORMATS]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda weight: packed(*weight), weights))
    assert all(same(each, reference(*weight)) for each, weight in zip(found, weights, strict=True))


LACKING = {"AVX2": ("avx512", "avxvnni"), "SSE": ("avx", "fma", "bmi", "f16c")}
"""The features, by the beginnings of their names, without which blocks are packed, too."""


@pytest.mark.parametrize(("kind", "name"), combinations(LACKING, FORMATS, together=1))
def test_other_instructions_give_the_same_bits(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_processor()
    if not host.features.get("avx512f"):
        pytest.skip("this processor has no AVX-512")
    features = {each: has and not each.startswith(LACKING[kind]) for each, has in host.features.items()}
    older = Processor(host.name, llvm.FeatureMap(features))
    monkeypatch.setattr(jit, "host_processor", lambda: older)
    compile_again: Callable[..., Any] = cache(block_packing._compile.__wrapped__)
    monkeypatch.setattr(block_packing, "_compile", compile_again)
    blocks = random_blocks(name, 35, 3, 9)
    assert same(packed(name, blocks), reference(name, blocks))


def test_what_does_not_fit_together_is_refused() -> None:
    form, blocks = FORMATS["q4_1"], random_blocks("q4_1", 20, 2, 0)
    output = torch.zeros(form.data_shape(20, 64), dtype=torch.uint8)
    pack_one = CpuBlockPacker().pack
    for wrong in (blocks[:0], blocks[:, :-1], blocks[:, ::2], blocks.astype(np.int8)):
        with pytest.raises(InvalidArgumentError, match="blocks must be rows of 20 bytes a block"):
            pack_one(form, wrong, output)
    for other in (output[:1], output[:, :1], output[..., :-1], output.char(), output.transpose(0, 1)):
        with pytest.raises(InvalidArgumentError, match=r"output must be uint8 \(2, 2, 320\)"):
            pack_one(form, blocks, other)
    for order in (np.full(20, 20), np.full(20, -1)):
        with pytest.raises(InvalidArgumentError, match=r"order must be .*numbers from 0 to 19"):
            pack_one(form, blocks, output, order)
    assert not output.any()


def test_only_a_cpu_has_a_packer() -> None:
    assert isinstance(select_block_packer(torch.device("cpu")), CpuBlockPacker)
    assert select_block_packer(torch.device("meta")) is None
