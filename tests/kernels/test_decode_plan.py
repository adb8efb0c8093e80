"""The compiled plan of a step of one token a request is the one that numpy makes."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.kernels.attention_metadata import build_attention_metadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.cpu.decode_plan import DecodePlanArguments, compile_decode_plan
from nbengine.kernels.cpu.layout import AttentionArguments, Features, Work
from nbengine.kernels.cpu.plan import DECODE_PART, decode_work
from tests.support.thorough import amount

CPU, FLOAT32 = torch.device("cpu"), torch.float32

KV_HEADS, LAYERS = 3, 2


@settings(max_examples=amount(25, thorough=4000))
@given(
    lengths=st.lists(
        st.one_of(st.integers(1, 2000), st.sampled_from([1, DECODE_PART, DECODE_PART + 1])),
        min_size=1,
        max_size=64,
    ),
    has_ids=st.booleans(),
    rule=st.one_of(
        st.just({}),
        st.builds(lambda size: {"window": size}, st.integers(1, 2100)),
        st.builds(lambda size: {"chunk": size}, st.integers(1, 2100)),
    ),
)
def test_it_is_the_plan_of_numpy(lengths: list[int], has_ids: bool, rule: dict[str, int]) -> None:
    options = AttentionOptions(1.0, **rule)
    seq_lens = np.array(lengths, np.int32)
    table = np.zeros((len(lengths), -(-max(lengths) // 16) + 2), np.int32)
    metadata = build_attention_metadata(
        np.ones(len(lengths), np.int32),
        seq_lens,
        table,
        block_size=16,
        kernels=CpuKernels(FLOAT32),
        device=CPU,
    )
    expected = decode_work(metadata, options)
    ids, positions, slots = (np.arange(len(lengths)) + start for start in (7, 70, 700))
    own = np.full((3, len(lengths) + 3), -1)
    work = np.full((len(expected.rows) + 1, len(Work)), -1, np.int32)
    attends = [AttentionArguments(kv_heads=KV_HEADS, query=5, span=options.span or 0) for _ in range(LAYERS)]
    addresses = np.array([ctypes.addressof(attend) for attend in attends])
    arguments = DecodePlanArguments(
        items=1,
        rows=len(lengths),
        decodes=len(lengths),
        capacity=len(lengths) + 3,
        kv_heads=KV_HEADS,
        ids=ids.ctypes.data if has_ids else 0,
        positions=positions.ctypes.data,
        slots=slots.ctypes.data,
        seq_lens=seq_lens.ctypes.data,
        block_table=table.ctypes.data,
        block_table_stride=table.strides[0],
        own=own.ctypes.data,
        work=work.ctypes.data,
        attends=addresses.ctypes.data,
        layers=LAYERS,
    )
    compile_decode_plan(Features.of(options).span).call(ctypes.addressof(arguments))
    assert np.array_equal(work[:-1], expected.rows)
    assert (work[-1] == -1).all()
    assert np.array_equal(own[:, : len(ids)], [ids if has_ids else [-1] * len(ids), positions, slots])
    assert (own[:, len(ids) :] == -1).all()
    for attend in attends:
        assert attend.items == len(expected.rows) * KV_HEADS
        assert (attend.block_table, attend.block_table_stride) == (table.ctypes.data, table.strides[0])
        assert (attend.query, attend.kv_heads) == (5, KV_HEADS)
