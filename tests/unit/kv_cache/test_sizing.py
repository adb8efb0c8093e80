"""The number of KV blocks, and what is said when they are too few."""

from __future__ import annotations

import pytest

from nbengine.config import CacheConfig
from nbengine.errors import EngineStartError
from nbengine.kv_cache.sizing import KVCacheSpec, check_max_model_len, num_blocks_for
from nbengine.units import size

SPEC = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, dtype_bytes=2, block_size=16)
PAGE = 30 * 2 * 3 * 64 * 2 * 16


def test_a_page_holds_the_keys_and_values_of_all_layers() -> None:
    assert SPEC.page_size_bytes == PAGE == 368_640


def test_available_memory_is_rounded_down_to_whole_blocks() -> None:
    assert num_blocks_for(SPEC, CacheConfig(), 10 * PAGE + PAGE - 1) == 10


def test_an_explicit_count_wins_over_what_is_available() -> None:
    config = CacheConfig(kv_cache_memory_bytes=3 * PAGE, num_gpu_blocks_override=7)
    assert num_blocks_for(SPEC, config, 3 * PAGE) == 7


@pytest.mark.parametrize(
    ("config", "argument"),
    [
        (CacheConfig(), "gpu_memory_utilization"),
        (CacheConfig(kv_cache_memory_bytes=5), "kv_cache_memory_bytes"),
    ],
)
def test_no_room_for_one_block_names_the_numbers_and_the_argument(config: CacheConfig, argument: str) -> None:
    with pytest.raises(EngineStartError, match=f"5 B is .*{size(PAGE)}.*{argument}"):
        num_blocks_for(SPEC, config, 5)


def test_a_model_length_that_just_fits_is_accepted() -> None:
    check_max_model_len(PAGE, CacheConfig(), 4, 64)


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (CacheConfig(), "raise gpu_memory_utilization or set kv_cache_memory_bytes"),
        (CacheConfig(kv_cache_memory_bytes=4 * PAGE), f"raise kv_cache_memory_bytes to at least {5 * PAGE}"),
        (CacheConfig(num_gpu_blocks_override=4), "raise num_gpu_blocks_override to at least 5"),
    ],
)
def test_a_model_length_that_does_not_fit_says_what_would(config: CacheConfig, remedy: str) -> None:
    with pytest.raises(EngineStartError) as error:
        check_max_model_len(PAGE, config, 4, 65)
    message = str(error.value)
    assert "max_model_len=65 needs 5 KV blocks of 16 tokens" in message
    assert "lower max_model_len to at most 64" in message
    assert remedy in message
