"""The oracle itself, against torch's dense attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nbengine.kernels import reference
from nbengine.kernels.torch.backend import TorchKernels

LENS = [(1, 1), (1, 37), (5, 5), (7, 40)]


@pytest.mark.parametrize("shape", [(6, 2, 16, 8), (4, 4, 40, 16)])
def test_paged_reference_equals_dense_attention(make_batch, make_shape, shape):
    batch = make_batch(TorchKernels(), make_shape(*shape), LENS, torch.float64)
    actual = batch.expected()
    starts = batch.metadata.query_start_loc.tolist()
    token = 0
    for (query_len, seq_len), start in zip(LENS, starts, strict=False):
        keys, values = (
            tensor[token : token + seq_len].transpose(0, 1)[None] for tensor in (batch.key, batch.value)
        )
        token += seq_len
        mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        queries = batch.query[start : start + query_len].transpose(0, 1)[None]
        dense = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=batch.options.scale, enable_gqa=True
        )
        torch.testing.assert_close(actual[start : start + query_len], dense[0].transpose(0, 1))


@pytest.mark.parametrize("transposed", [False, True])
def test_write_puts_tokens_where_the_slots_say_and_skips_negative_ones(transposed):
    key, value = torch.randn(2, 3, 2, 8).unbind()
    kv_cache = torch.zeros(2, 4, 2, 4, 8)
    reference.write_kv(key, value, kv_cache, torch.tensor([6, -1, 15]), keys_transposed=transposed)
    keys = reference.rows_of_keys(kv_cache, transposed)
    assert torch.equal(keys[1, :, 2], key[0])
    assert torch.equal(kv_cache[1, 1, :, 2], value[0])
    assert torch.equal(keys[3, :, 3], key[2])
    assert torch.equal(kv_cache[1, 3, :, 3], value[2])
    assert int((kv_cache != 0).sum()) == 2 * 2 * 2 * 8
