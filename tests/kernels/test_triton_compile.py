"""The Triton kernels compiled for real devices, without one: they fit, and keep everything in registers."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from nbengine.kernels import experts_triton, write_kv_triton
from nbengine.kernels import paged_attention_triton as attention

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
POINTER = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: bytes of spilled registers and of shared memory a program."""

    spilled: int
    shared: int


@pytest.fixture(autouse=True)
def private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def compile_for(tmp_path):
    def compile_for(
        arch: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any
    ) -> Resources:
        signature = {
            name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
        }
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*")
        }
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        target = GPUTarget("cuda", arch, 32)
        compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})
        ptx = tmp_path / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        name = "sm_90a" if arch == 90 else f"sm_{arch}"
        ptxas = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name={name}",
            str(ptx),
            "-o",
            str(tmp_path / "kernel.cubin"),
        ]
        report = subprocess.run(ptxas, capture_output=True, text=True, check=True).stderr
        spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", report))
        assert "registers" in report
        return Resources(spilled, compiled.metadata.shared)

    return compile_for


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "decode", "split"),
    [
        (BFLOAT16, 64, 3, True, True),
        (BFLOAT16, 64, 3, True, False),
        (BFLOAT16, 64, 3, False, False),
        (BFLOAT16, 80, 1, False, False),
        (BFLOAT16, 128, 8, True, True),
        (BFLOAT16, 128, 8, False, False),
        (BFLOAT16, 256, 4, False, False),
        (FLOAT32, 64, 3, True, True),
        (FLOAT32, 128, 4, False, False),
    ],
)
def test_attention_fits_without_spilling(compile_for, arch, dtype, head_dim, group, decode, split):
    tiling = attention.choose_tiling(head_dim, group, dtype, decode=decode)
    data = dict.fromkeys(("output", "query", "key_cache", "value_cache"), POINTER[dtype])
    partial = dict.fromkeys(("partial_sums", "partial_stats"), "*fp32" if split else POINTER[dtype])
    indices = dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "*i32")
    constants = {
        "KV_HEADS": 2,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WIDTH": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": 16,
        "ROWS": tiling.rows,
        "TOKENS": tiling.tokens,
        "DECODE": decode,
        "SPLIT": split,
    }
    resources = compile_for(
        arch,
        attention.attention_kernel,
        {**data, **partial, **indices, "scale": "fp32"},
        constants,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    assert resources.spilled == 0
    assert resources.shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize("arch", [80, 90])
def test_merge_and_write_fit_without_spilling(compile_for, arch):
    merge = compile_for(
        arch,
        attention.merge_kernel,
        {"output": "*bf16", "partial_sums": "*fp32", "partial_stats": "*fp32", "seq_lens": "*i32"},
        {"HEAD_DIM": 128, "WIDTH": 128, "SPLITS": attention.MAX_SPLITS},
    )
    tensors = dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16")
    write = compile_for(
        arch,
        write_kv_triton.write_kv_kernel,
        {**tensors, "slots": "*i64"},
        {"KV_HEADS": 3, "HEAD_DIM": 64, "BLOCK_SIZE": 16, "WIDTH": 256},
    )
    assert (merge.spilled, write.spilled) == (0, 0)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "assignments"),
    [(BFLOAT16, 8), (BFLOAT16, 4096), (BFLOAT16, 65536), (FLOAT32, 8), (FLOAT32, 65536)],
)
def test_experts_fit_without_spilling(compile_for, arch, dtype, assignments):
    tiling = experts_triton.choose_tiling(assignments, 128, dtype)
    sizes = {"HIDDEN": 2048, "INNER": 768, "NUM_EXPERTS": 128, "BINS": 128}
    tiles = {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "DEPTH": tiling.depth}
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    data = dict.fromkeys(("activated", "x", "gate_up", "outputs", "down"), POINTER[dtype])
    indices = dict.fromkeys(("order", "starts", "counts"), "*i32")
    products = {
        experts_triton.gate_up_kernel: {**sizes, **tiles, "PER_TOKEN": 8},
        experts_triton.down_kernel: {**sizes, **tiles},
    }
    for kernel, constants in products.items():
        resources = compile_for(arch, kernel, {**data, **indices}, constants, **options)
        assert resources.spilled == 0
        assert resources.shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize("arch", [80, 90])
def test_plan_and_combination_of_experts_fit_without_spilling(compile_for, arch):
    indices = {**dict.fromkeys(("order", "starts", "counts"), "*i32"), "experts": "*i64"}
    plan = compile_for(arch, experts_triton.plan_kernel, indices, {"NUM_EXPERTS": 128, "CHUNK": 1024})
    data = {"result": "*bf16", "outputs": "*bf16", "weights": "*fp32", "experts": "*i64"}
    constants = {"PER_TOKEN": 8, "CHOICES": 8, "HIDDEN": 2048, "NUM_EXPERTS": 128, "COLUMNS": 256}
    combine = compile_for(arch, experts_triton.combine_kernel, data, constants)
    assert (plan.spilled, combine.spilled) == (0, 0)


@pytest.mark.parametrize("num_experts", [1, 7, 128])
@pytest.mark.parametrize("assignments", [1, 8, 100, 5000])
def test_the_grid_of_experts_has_a_program_for_every_tile_however_the_tokens_fall(num_experts, assignments):
    rows = experts_triton.choose_tiling(assignments, num_experts, BFLOAT16).rows
    generator = torch.Generator().manual_seed(assignments)
    for skew in (0.0, 1.0, 8.0):
        shares = torch.rand(num_experts, generator=generator).pow(skew)
        chosen = shares.multinomial(assignments, replacement=True, generator=generator)
        tiles = (chosen.bincount() + rows - 1) // rows
        assert tiles.sum() <= experts_triton.max_tiles(assignments, num_experts, rows) <= assignments


@pytest.mark.parametrize("programs", [1, 3, 40, 1000])
@pytest.mark.parametrize("max_seq_len", [1, 128, 129, 5000, 131_072])
def test_splits_cover_the_context_and_none_is_empty(programs, max_seq_len):
    splits, tokens = attention.choose_splits(programs, max_seq_len, processors=132)
    assert 1 <= splits <= attention.MAX_SPLITS
    assert (splits - 1) * tokens < max_seq_len <= splits * tokens
    if programs >= 264:
        assert splits == 1
