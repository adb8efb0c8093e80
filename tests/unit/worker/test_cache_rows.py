"""Layers that keep different numbers of a token share the blocks of one pool, and never write into each other's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import GEMMA_4
from hypothesis import given
from hypothesis import strategies as st

from nbengine.distributed.layout import RankLayout
from nbengine.errors import EngineStartError
from nbengine.kv_cache.specs import make_groups
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.registry import decoder_config
from nbengine.models.sharding import DecoderShard
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.memory.cache_rows import CacheRows
from nbengine.worker.memory.layer_caches import layer_caches, tensors_among
from tests.unit.models.conftest import SIZES

BLOCK, NUM_BLOCKS = 4, 6


def config_of(**settings: Any) -> DecoderConfig:
    hf = {**SIZES, **GEMMA_4, "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4}
    return decoder_config({**hf, **settings})


def layout(tp_size: int = 1) -> RankLayout:
    return RankLayout(0, tp_size, 0, 1, 0, 1)


def rows_of(config: DecoderConfig, tp_size: int = 1, dtype: torch.dtype = torch.bfloat16) -> CacheRows:
    return CacheRows.of(config, layout(tp_size), dtype, make_groups(config.cache_rules()))


def test_a_block_is_as_large_as_the_widest_layers_need() -> None:
    # Windows have two heads of 16 numbers; the others two of 32, or one.
    assert rows_of(config_of()) == CacheRows(64, (2, 1))
    few = config_of(attention_k_eq_v=True, num_global_key_value_heads=1)
    assert rows_of(few) == CacheRows(32, (1, 1))
    # A rank has a whole head at least, so that ratios change with their number.
    assert rows_of(few, tp_size=2) == CacheRows(32, (2, 1))


@pytest.mark.parametrize(("heads", "of_full"), [(1, None), (2, None), (8, 2), (16, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_the_rows_of_every_gemma_4_divide_the_widest(
    heads: int, of_full: int | None, dtype: torch.dtype
) -> None:
    sizes = {"num_attention_heads": 16, "num_key_value_heads": heads, "num_hidden_layers": 4}
    full = {"attention_k_eq_v": of_full is not None, "num_global_key_value_heads": of_full}
    config = config_of(head_dim=256, global_head_dim=512, **sizes, **full)
    width = 256 if dtype is torch.bfloat16 else 260
    assert rows_of(config, dtype=dtype).widest == width * max(heads, 2 * (of_full or heads))


def test_rows_that_do_not_divide_the_widest_are_refused() -> None:
    with pytest.raises(EngineStartError, match=r"keep 40 and 72 numbers of a token.*kv_cache_dtype='auto'"):
        rows_of(config_of(), dtype=torch.int8)


@given(
    st.integers(1, 4).map(lambda heads: 2**heads),
    st.integers(0, 2),
    st.permutations(range(NUM_BLOCKS)),
)
def test_what_a_layer_writes_into_its_block_lies_in_that_block_alone(
    head_dim: int, shared: int, blocks: list[int]
) -> None:
    config = config_of(global_head_dim=head_dim * 4, head_dim=head_dim, num_kv_shared_layers=shared)
    groups, place = make_groups(config.cache_rules()), layout()
    rows = rows_of(config)
    model: Any = SimpleNamespace(
        config=config, layout=place, shard=DecoderShard.of(config, place), device=torch.device("cpu")
    )
    sizes: dict[str, int] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK, "num_slots": 0}
    caches = layer_caches(model, groups, rows, torch.float32, **sizes)
    batch = InputBatch(2, 64, BLOCK, 96, num_tables=groups.num_tables, spreads=rows.spreads)
    batch._extend_blocks(0, blocks[: groups.num_tables])
    whole = [cache.view(2, NUM_BLOCKS, -1) for cache in tensors_among(caches)]
    assert len(whole) == groups.num_tensors(range(4))
    for layer, cache in enumerate(caches):
        group = groups.layer_groups[layer]
        cache[:, batch.block_tables[group, 0, 0]] = 1 + layer
        source = config.layer(layer).source
        if source is not None:
            assert cache.data_ptr() == caches[source].data_ptr()
        written = {int(block) for tensor in whole for block in np.flatnonzero(tensor.any(2).any(0))}
        assert written == {blocks[group]}
        cache.zero_()
