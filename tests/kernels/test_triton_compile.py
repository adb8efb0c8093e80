"""The Triton kernels compiled for real devices, without one: they fit, and keep everything in registers."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from tests.support.thorough import THOROUGH, amount, combinations

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nbengine.kernels.triton import delta_rule as delta_rule_triton
from nbengine.kernels.triton import experts as experts_triton
from nbengine.kernels.triton import latent_attention as latent
from nbengine.kernels.triton import paged_attention as attention
from nbengine.kernels.triton import row_functions as rows_triton
from nbengine.kernels.triton import short_convolution as convolution_triton
from nbengine.kernels.triton import splits as splits_triton
from nbengine.kernels.triton import state_space as state_space_triton
from nbengine.kernels.triton import write_kv as write_kv_triton
from nbengine.kernels.triton.attention_rule import CHUNK, NO_SPAN, WINDOW
from nbengine.models.checkpoints.storage import cache_dir
from tests.kernels.kept_resources import FOLDER, KeptResources, Resources

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
POINTER = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    # The assembler is run by Triton alone, which then prints what it says.
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)


@pytest.fixture(scope="module")
def kept():
    return KeptResources(cache_dir() / FOLDER)


@pytest.fixture
def compile_for(capsys, kept):
    def compile_for(
        arch: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any
    ) -> Resources:
        signature = {
            name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
        }
        place = kept.place(arch, kernel, signature, constants, options)
        known = kept.find(place)
        if known is not None:
            return known
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*")
        }
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        target = GPUTarget("cuda", arch, 32)
        capsys.readouterr()
        compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})
        report = capsys.readouterr().out
        spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", report))
        assert "registers" in report
        found = Resources(spilled, compiled.metadata.shared)
        kept.keep(place, found)
        return found

    return compile_for


PLAIN = (NO_SPAN, False, False)
WINDOW_AND_SINKS = (WINDOW, False, True)
WINDOW_AND_CAP = (WINDOW, True, False)
CHUNKS = (CHUNK, False, False)


ARCHITECTURES = [80, 90]
SMALLER = [80]
"""Kernels that need little are compiled for the one with less shared memory and equally many registers."""


@pytest.mark.parametrize(
    ("arch", "case"),
    combinations(
        ARCHITECTURES,
        [
            (BFLOAT16, 64, 3, True, True, PLAIN),
            (BFLOAT16, 64, 3, True, False, PLAIN),
            (BFLOAT16, 64, 3, False, False, PLAIN),
            (BFLOAT16, 80, 1, False, False, PLAIN),
            (BFLOAT16, 128, 8, True, True, PLAIN),
            (BFLOAT16, 128, 8, False, False, PLAIN),
            (BFLOAT16, 192, 4, True, True, PLAIN),
            (BFLOAT16, 192, 4, False, False, PLAIN),
            (BFLOAT16, 256, 4, False, False, PLAIN),
            (BFLOAT16, 512, 8, True, True, PLAIN),
            (BFLOAT16, 512, 8, True, False, PLAIN),
            (BFLOAT16, 512, 8, False, False, PLAIN),
            (FLOAT32, 512, 4, True, True, PLAIN),
            (FLOAT32, 512, 4, False, False, PLAIN),
            (FLOAT32, 64, 3, True, True, PLAIN),
            (FLOAT32, 128, 4, False, False, PLAIN),
            (BFLOAT16, 64, 8, True, True, WINDOW_AND_SINKS),
            (BFLOAT16, 64, 8, False, False, WINDOW_AND_SINKS),
            (BFLOAT16, 256, 2, True, True, WINDOW_AND_CAP),
            (BFLOAT16, 256, 2, False, False, WINDOW_AND_CAP),
            (BFLOAT16, 128, 5, False, False, CHUNKS),
            (FLOAT32, 64, 3, False, False, WINDOW_AND_CAP),
            (FLOAT32, 128, 4, False, False, WINDOW_AND_SINKS),
        ],
        together=1,
    ),
)
def test_attention_fits_without_spilling(compile_for, arch, case):
    dtype, head_dim, group, decode, split, features = case
    span, has_soft_cap, has_sinks = features
    tiling = attention.choose_tiling(head_dim, group, dtype, decode=decode, has_soft_cap=has_soft_cap)
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
        "SPAN": span,
        "SOFT_CAP": has_soft_cap,
        "SINKS": has_sinks,
    }
    sinks = "*fp32" if has_sinks else POINTER[dtype]
    resources = compile_for(
        arch,
        attention.attention_kernel,
        {**data, **partial, **indices, "scale": "fp32", "soft_cap": "fp32", "sinks": sinks},
        constants,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    assert resources.spilled == 0
    assert resources.shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize(
    ("arch", "heads", "case"),
    combinations(
        ARCHITECTURES, [16, 128], list(itertools.product([False, True], [BFLOAT16, FLOAT32])), together=1
    ),
)
def test_latent_attention_fits_without_spilling(compile_for, arch, heads, case):
    (decode, dtype), rank, rope = case, 512, 64
    tiling = latent.choose_tiling(rank, heads, dtype, decode=decode)
    data = dict.fromkeys(("output", "query", "cache"), POINTER[dtype])
    partial = dict.fromkeys(("partial_sums", "partial_stats"), "*fp32" if decode else POINTER[dtype])
    indices = dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "*i32")
    constants = {
        "HEADS": heads,
        "RANK": rank,
        "ROPE": rope,
        "RANK_WIDTH": rank,
        "ROPE_WIDTH": rope,
        "BLOCK_SIZE": 16,
        "ROWS": tiling.rows,
        "TOKENS": tiling.tokens,
        "DECODE": decode,
        "SPLIT": decode,
    }
    resources = compile_for(
        arch,
        latent.latent_kernel,
        {**data, **partial, **indices, "scale": "fp32"},
        constants,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    assert resources.spilled == 0
    assert resources.shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize("arch", amount(SMALLER, thorough=ARCHITECTURES))
def test_merge_and_write_of_latents_fit_without_spilling(compile_for, arch):
    merge = compile_for(
        arch,
        splits_triton.merge_kernel,
        {"output": "*bf16", "partial_sums": "*fp32", "partial_stats": "*fp32", "seq_lens": "*i32"},
        {"HEAD_DIM": 512, "WIDTH": 512, "SPLITS": splits_triton.MAX_SPLITS, "TOKENS": 32, "SPAN": NO_SPAN},
        num_warps=latent.MERGE_WARPS,
    )
    write = compile_for(
        arch,
        latent.write_latent_kernel,
        {"rows": "*bf16", "cache": "*bf16", "slots": "*i64"},
        {"SIZE": 576, "WIDTH": 1024},
    )
    assert (merge.spilled, write.spilled) == (0, 0)


@pytest.mark.parametrize("arch", amount(SMALLER, thorough=ARCHITECTURES))
def test_merge_and_write_fit_without_spilling(compile_for, arch):
    merge = compile_for(
        arch,
        splits_triton.merge_kernel,
        {"output": "*bf16", "partial_sums": "*fp32", "partial_stats": "*fp32", "seq_lens": "*i32"},
        {
            "HEAD_DIM": 128,
            "WIDTH": 128,
            "SPLITS": splits_triton.MAX_SPLITS,
            "TOKENS": 64,
            "SPAN": WINDOW,
        },
    )
    tensors = dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16")
    write = compile_for(
        arch,
        write_kv_triton.write_kv_kernel,
        {**tensors, "slots": "*i64"},
        {"KV_HEADS": 3, "HEAD_DIM": 64, "BLOCK_SIZE": 16, "WIDTH": 256},
    )
    assert (merge.spilled, write.spilled) == (0, 0)


@pytest.mark.parametrize("arch", amount(SMALLER, thorough=ARCHITECTURES))
def test_functions_of_rows_fit_without_spilling(compile_for, arch):
    data = dict.fromkeys(("output", "x", "added", "gate", "other", "angles"), "*bf16")
    norm = {**data, "weight": "*fp32", "scale": "fp32", "eps": "fp32"}
    found = []
    for size in (128, rows_triton.MAX_ROW):
        constants, warps = rows_triton.norm_shape(size)
        each = {**constants, "ADD": True}
        found.append(compile_for(arch, rows_triton.rms_norm_kernel, norm, each, num_warps=warps))
    for activation in rows_triton.ACTIVATIONS:
        each = {"SIZE": 5632, "COLUMNS": 1024, "OFFSET": 5632, "ACTIVATION": activation}
        found.append(compile_for(arch, rows_triton.gate_kernel, data, each))
    heads = {"HEADS": 40, "HALF": 64, "WIDTH": 64, "ROWS": 8}
    found.append(compile_for(arch, rows_triton.rotate_kernel, data, heads))
    assert {each.spilled for each in found} == {0}


@pytest.mark.parametrize(
    ("arch", "case"),
    combinations(
        ARCHITECTURES,
        [(BFLOAT16, 8), (BFLOAT16, 4096), (BFLOAT16, 65536), (FLOAT32, 8), (FLOAT32, 65536)],
        together=1,
    ),
)
def test_experts_fit_without_spilling(compile_for, arch, case):
    dtype, assignments = case
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


@pytest.mark.parametrize("arch", amount(SMALLER, thorough=ARCHITECTURES))
def test_plan_and_combination_of_experts_fit_without_spilling(compile_for, arch):
    indices = {**dict.fromkeys(("order", "starts", "counts"), "*i32"), "experts": "*i64"}
    plan = compile_for(arch, experts_triton.plan_kernel, indices, {"NUM_EXPERTS": 128, "CHUNK": 1024})
    data = {"result": "*bf16", "outputs": "*bf16", "weights": "*fp32", "experts": "*i64"}
    constants = {"PER_TOKEN": 8, "CHOICES": 8, "HIDDEN": 2048, "NUM_EXPERTS": 128, "COLUMNS": 256}
    combine = compile_for(arch, experts_triton.combine_kernel, data, constants)
    assert (plan.spilled, combine.spilled) == (0, 0)


RECURRENT_INDICES = dict.fromkeys(
    ("query_start_loc", "slots", "sources", "checkpoint_start_loc", "checkpoint_ends", "checkpoint_slots"),
    "*i32",
)


@pytest.mark.parametrize(
    ("arch", "decode", "sizes"),
    combinations([80, 90], [True, False], [(BFLOAT16, 128, 128), (FLOAT32, 128, 128), (BFLOAT16, 256, 256)]),
)
def test_the_delta_rule_fits_without_spilling(compile_for, arch, decode, sizes):
    dtype, key_dim, value_dim = sizes
    tiling = delta_rule_triton.choose_tiling(key_dim, value_dim, dtype, decode=decode)
    data = dict.fromkeys(("output", "query", "key", "value"), POINTER[dtype])
    numbers = {**dict.fromkeys(("decay", "beta", "states"), "*fp32"), "scale": "fp32"}
    constants = {
        "HEADS": 16,
        "GROUP": 2,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "EPS": 1e-6,
    }
    if not decode:
        chunks = {"TOKENS": delta_rule_triton.CHUNK, "SLICE": delta_rule_triton.SLICE}
        constants |= {**chunks, "PRECISION": tiling.precision}
    resources = compile_for(
        arch,
        delta_rule_triton.step_kernel if decode else delta_rule_triton.chunks_kernel,
        {**data, **numbers, **RECURRENT_INDICES},
        constants,
        num_warps=tiling.warps,
        num_stages=1,
    )
    assert resources.spilled == 0
    assert resources.shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize(
    ("arch", "decode", "sizes"),
    combinations([80, 90], [True, False], [(BFLOAT16, 128, 64), (FLOAT32, 128, 64), (BFLOAT16, 256, 128)]),
)
def test_the_state_space_fits_without_spilling(compile_for, arch, decode, sizes):
    dtype, state_size, head_dim = sizes
    tiling = delta_rule_triton.choose_tiling(state_size, head_dim, dtype, decode=decode)
    data = dict.fromkeys(("output", "x", "b", "c"), POINTER[dtype])
    numbers = dict.fromkeys(("dt", "rate", "skip", "states"), "*fp32")
    constants = {
        "HEADS": 16,
        "GROUP": 16,
        "STATE_SIZE": state_size,
        "HEAD_DIM": head_dim,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
    }
    if not decode:
        chunks = {"TOKENS": state_space_triton.CHUNK, "SLICE": state_space_triton.SLICE}
        constants |= {**chunks, "PRECISION": tiling.precision}
    resources = compile_for(
        arch,
        state_space_triton.step_kernel if decode else state_space_triton.chunks_kernel,
        {**data, **numbers, **RECURRENT_INDICES},
        constants,
        num_warps=tiling.warps if decode else state_space_triton.WARPS,
        num_stages=1,
    )
    assert resources.spilled == 0
    assert resources.shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize(
    ("arch", "tokens"), combinations(ARCHITECTURES, [1, convolution_triton.TOKENS], together=1)
)
def test_the_short_convolution_fits_without_spilling(compile_for, arch, tokens):
    data = dict.fromkeys(("output", "x", "weight", "bias", "conv"), "*bf16")
    sizes = {"CHANNELS": 6144, "KERNEL": 4, "COLUMNS": convolution_triton.COLUMNS}
    options = {"TOKENS": tokens, "HAS_BIAS": True, "SILU": True}
    convolve = compile_for(
        arch, convolution_triton.convolve_kernel, {**data, **RECURRENT_INDICES}, {**sizes, **options}
    )
    keep = compile_for(arch, convolution_triton.keep_kernel, {**data, **RECURRENT_INDICES}, sizes)
    assert (convolve.spilled, keep.spilled) == (0, 0)


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


def test_what_is_kept_belongs_to_one_kernel_and_one_way_of_compiling_it(tmp_path):
    kept, kernel = KeptResources(tmp_path / "kept"), splits_triton.merge_kernel
    first = kept.place(80, kernel, {"a": "*i32"}, {"B": 1}, {})
    others = [
        kept.place(90, kernel, {"a": "*i32"}, {"B": 1}, {}),
        kept.place(80, attention.attention_kernel, {"a": "*i32"}, {"B": 1}, {}),
        kept.place(80, kernel, {"a": "*i64"}, {"B": 1}, {}),
        kept.place(80, kernel, {"a": "*i32"}, {"B": 2}, {}),
        kept.place(80, kernel, {"a": "*i32"}, {"B": 1}, {"num_warps": 8}),
    ]
    assert len({first, *others}) == 6
    kept.keep(first, Resources(1, 2))
    assert kept.find(first) == (None if THOROUGH else Resources(1, 2))
    assert kept.find(others[0]) is None
