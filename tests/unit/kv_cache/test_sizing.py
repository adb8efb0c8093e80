"""The number of KV blocks, and what is said when they are too few."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbengine.config import CacheConfig
from nbengine.errors import EngineStartError
from nbengine.kv_cache.sizing import (
    RankCacheSpec,
    cache_size,
    check_max_model_len,
    num_blocks_for,
    spare_slots,
    state_tokens,
)
from nbengine.kv_cache.specs import FULL, LayerRule, make_groups
from nbengine.units import size

SPEC = RankCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, dtype_bytes=2, block_size=16)
PAGE = 30 * 2 * 3 * 64 * 2 * 16


def test_a_page_holds_the_keys_and_values_of_all_layers() -> None:
    assert SPEC.page_size_bytes == PAGE == 368_640


def test_a_page_holds_the_scales_of_an_int8_cache_too() -> None:
    narrow = replace(SPEC, dtype_bytes=1, scale_bytes=4)
    assert narrow.page_size_bytes == 30 * 2 * 3 * (64 + 4) * 16


def test_available_memory_is_rounded_down_to_whole_blocks() -> None:
    assert num_blocks_for(SPEC, CacheConfig(), 10 * PAGE + PAGE - 1) == 10


def test_an_explicit_count_wins_over_what_is_available() -> None:
    config = CacheConfig(kv_cache_memory_bytes=3 * PAGE, num_gpu_blocks_override=7)
    assert num_blocks_for(SPEC, config, 3 * PAGE) == 7


@pytest.mark.parametrize(
    ("config", "argument"),
    [
        (
            CacheConfig(),
            "gpu_memory_utilization or .*, or lower block_size, max_num_batched_tokens, max_num_seqs or max_model_len$",
        ),
        (CacheConfig(kv_cache_memory_bytes=5), "kv_cache_memory_bytes, or lower block_size$"),
    ],
)
def test_no_room_for_one_block_names_the_numbers_and_the_argument(config: CacheConfig, argument: str) -> None:
    with pytest.raises(EngineStartError, match=f"5 B is .*{size(PAGE)}.*{argument}"):
        num_blocks_for(SPEC, config, 5)


def test_a_model_length_that_just_fits_is_accepted() -> None:
    longest = 4 * CacheConfig().block_size
    check_max_model_len(PAGE, CacheConfig(), 4, longest)
    with pytest.raises(EngineStartError, match=f"lower max_model_len to at most {longest},"):
        check_max_model_len(PAGE, CacheConfig(), 4, longest + 1)


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


HYBRID = replace(
    SPEC, num_layers=10, groups=make_groups([LayerRule("recurrent", 3000)] * 2 + [FULL]), slot_bytes=1_000_000
)


def test_recurrent_states_of_all_requests_and_checkpoints_get_their_share_beside_the_blocks() -> None:
    page = HYBRID.page_size_bytes
    num_blocks, num_slots = cache_size([HYBRID], CacheConfig(), [100_000_000], 8)
    # Eight for the requests, and a quarter of the rest for checkpoints.
    assert num_slots == 8 + 92 // 4
    assert num_blocks == (100_000_000 - num_slots * 1_000_000) // page


def test_requests_that_run_take_at_most_half_of_the_bytes_for_their_states() -> None:
    _, num_slots = cache_size([HYBRID], CacheConfig(), [100_000_000], 256)
    assert num_slots == 50 + 50 // 4


def test_no_room_for_one_state_names_the_numbers_and_the_argument() -> None:
    with pytest.raises(
        EngineStartError, match=f"{size(900_000)} is .*{size(1_000_000)}.*kv_cache_memory_bytes"
    ):
        cache_size([HYBRID], CacheConfig(kv_cache_memory_bytes=1_800_000), [1_800_000], 8)


def test_slots_beside_a_given_number_of_blocks_take_no_more_bytes_than_these() -> None:
    page = HYBRID.page_size_bytes
    config = CacheConfig(num_gpu_blocks_override=100)
    assert cache_size([HYBRID], config, [0], 256) == (100, 100 * page // 1_000_000)
    assert cache_size([HYBRID], config, [0], 2) == (100, 4)


@pytest.mark.parametrize(
    ("num_slots", "max_num_seqs", "spare"),
    [(1, 8, 0), (2, 8, 1), (3, 8, 1), (4, 8, 1), (54, 256, 13), (8, 6, 2), (31, 8, 23), (0, 8, 0)],
)
def test_some_slots_are_left_to_checkpoints_however_many_requests_would_run(
    num_slots: int, max_num_seqs: int, spare: int
) -> None:
    assert spare_slots(num_slots, max_num_seqs, CacheConfig()) == spare
    assert spare_slots(num_slots, max_num_seqs, CacheConfig(enable_prefix_caching=False)) == 0


def test_a_state_is_weighed_against_the_keys_and_values_of_all_workers_and_groups() -> None:
    token = HYBRID.page_size_bytes / 16
    assert state_tokens([HYBRID]) == int(1_000_000 / token)
    windows = replace(HYBRID, groups=make_groups([LayerRule("recurrent", 6), FULL, LayerRule("window", 9)]))
    assert state_tokens([windows]) == int(1_000_000 / (2 * token))
    assert state_tokens([replace(HYBRID, slot_bytes=0), HYBRID]) == int(1_000_000 / (2 * token))
    assert state_tokens([replace(HYBRID, num_layers=0)]) == 0


def test_a_stage_without_layers_of_a_kind_does_not_limit_the_others() -> None:
    only_states = replace(HYBRID, num_layers=0)
    only_blocks = replace(HYBRID, slot_bytes=0)
    sizes = [100_000_000, 100_000_000]
    num_blocks, num_slots = cache_size([only_states, only_blocks], CacheConfig(), sizes, 8)
    assert num_slots == 8 + 92 // 4
    assert num_blocks == 100_000_000 // HYBRID.page_size_bytes


def test_windows_let_a_longer_request_fit() -> None:
    groups = make_groups([FULL, LayerRule("window", 32)])
    check_max_model_len(PAGE, CacheConfig(), 64 + 5, 1024, groups, 16)
    with pytest.raises(EngineStartError, match="lower max_model_len to at most 1008, or raise"):
        check_max_model_len(PAGE, CacheConfig(), 63 + 4, 1024, groups, 16)


def test_a_step_that_is_too_long_for_the_windows_is_named() -> None:
    groups = make_groups([FULL, LayerRule("window", 32)])
    with pytest.raises(EngineStartError, match="or lower max_num_batched_tokens"):
        check_max_model_len(PAGE, CacheConfig(), 64 + 10, 1024, groups, 512)
