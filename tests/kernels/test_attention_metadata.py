"""The metadata of a step, against a loop over its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.attention_metadata import build_attention_metadata
from nbengine.kernels.torch.backend import TorchKernels

lens = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, n + 40)))


def build(pairs, block_size=8, blocks=8):
    query_lens, seq_lens = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    table = np.random.default_rng(0).permutation(len(pairs) * blocks).astype(np.int32).reshape(-1, blocks)
    metadata = build_attention_metadata(
        query_lens, seq_lens, table, block_size=block_size, kernels=TorchKernels(), device=torch.device("cpu")
    )
    return metadata, table


@given(st.lists(lens, min_size=1, max_size=7), st.sampled_from([8, 16]))
def test_metadata_equals_a_loop_over_the_tokens(pairs, block_size):
    metadata, table = build(pairs, block_size)
    slots, starts = [], [0]
    for request, (query_len, seq_len) in enumerate(pairs):
        for position in range(seq_len - query_len, seq_len):
            block = int(table[request, position // block_size])
            slots.append(block * block_size + position % block_size)
        starts.append(starts[-1] + query_len)
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.query_start_loc.tolist() == starts
    assert metadata.seq_lens.tolist() == [seq_len for _, seq_len in pairs]
    assert torch.equal(metadata.block_table, torch.from_numpy(table))
    assert (metadata.num_reqs, metadata.num_tokens) == (len(pairs), len(slots))
    assert metadata.max_query_len == max(query_len for query_len, _ in pairs)
    assert metadata.max_seq_len == max(seq_len for _, seq_len in pairs)
    singles = [query_len == 1 for query_len, _ in pairs]
    assert metadata.num_decodes == [*singles, False].index(False)


@pytest.mark.parametrize("columns", [([1, 1], [4], 1), ([], [], 0), ([1], [4], 2)])
def test_arrays_of_different_lengths_are_refused(columns):
    query_lens, seq_lens, rows = columns
    with pytest.raises(InvalidArgumentError, match="of one length, at least 1"):
        build_attention_metadata(
            np.array(query_lens, np.int32),
            np.array(seq_lens, np.int32),
            np.zeros((rows, 2), np.int32),
            block_size=8,
            kernels=TorchKernels(),
            device=torch.device("cpu"),
        )


def test_a_request_longer_than_its_row_of_the_table_is_refused():
    with pytest.raises(InvalidArgumentError, match="seq_lens must be at most 64, what the block table holds"):
        build([(1, 65)])
