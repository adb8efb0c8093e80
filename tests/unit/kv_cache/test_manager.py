"""The KV cache manager: what is shared, what is computed again, what is given back."""

from __future__ import annotations

import pytest

from nbengine.errors import NBEngineError
from nbengine.kv_cache.manager import KVCacheManager
from nbengine.kv_cache.prefix import ExtraKeys
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.request import Request


def make_manager(num_blocks: int = 8, caching: bool = True, max_model_len: int = 64) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size=4, max_model_len=max_model_len, enable_caching=caching)


def make_request(
    tokens: list[int], name: str = "r", extra_keys: ExtraKeys = (), prompt_logprobs: int | None = None
) -> Request:
    return Request(name, tokens, SamplingParams(prompt_logprobs=prompt_logprobs), extra_keys=extra_keys)


def compute(manager: KVCacheManager, request: Request, count: int | None = None) -> int:
    """Run `count` tokens (all, unless given) of a request that starts; returns how many were found."""
    blocks, found = manager.get_computed_blocks(request)
    count = request.num_tokens - found if count is None else count
    assert manager.allocate_slots(request, count, blocks) is not None
    request.num_computed_tokens = found + count
    manager.cache_blocks(request)
    return found


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    manager = make_manager()
    first, again = make_request(list(range(8)), "first"), make_request(list(range(8)), "again")
    assert compute(manager, first) == 0
    assert compute(manager, again) == 4
    assert again.block_ids[0] == first.block_ids[0]
    assert again.block_ids[1] != first.block_ids[1]


def test_a_longer_prompt_shares_the_full_blocks_only() -> None:
    manager = make_manager()
    first, longer = make_request(list(range(10)), "first"), make_request(list(range(16)), "longer")
    compute(manager, first)
    assert compute(manager, longer) == 8
    assert longer.block_ids[:2] == first.block_ids[:2]
    assert manager.block_pool.ref_count(first.block_ids[0]) == 2
    assert manager.block_pool.ref_count(first.block_ids[2]) == 1


def test_only_computed_tokens_are_cached() -> None:
    manager = make_manager()
    first = make_request(list(range(12)), "first")
    compute(manager, first, count=7)
    assert manager.block_pool.num_cached_blocks == 1
    assert manager.get_computed_blocks(make_request(list(range(12))))[1] == 4


@pytest.mark.parametrize("keys", [(("cache_salt", "b"),), ()])
def test_requests_with_different_extra_keys_share_nothing(keys: ExtraKeys) -> None:
    manager = make_manager()
    compute(manager, make_request(list(range(9)), extra_keys=(("cache_salt", "a"),)))
    assert manager.get_computed_blocks(make_request(list(range(9)), extra_keys=keys)) == ([], 0)
    assert (
        manager.get_computed_blocks(make_request(list(range(9)), extra_keys=(("cache_salt", "a"),)))[1] == 8
    )


def test_a_request_that_wants_prompt_logprobs_reads_no_cache_but_fills_it() -> None:
    manager = make_manager()
    assert compute(manager, make_request(list(range(9)), "first")) == 0
    assert compute(manager, make_request(list(range(9)), "logprobs", prompt_logprobs=1)) == 0
    assert manager.get_computed_blocks(make_request(list(range(9))))[1] == 8


def test_without_caching_nothing_is_ever_found() -> None:
    manager = make_manager(caching=False)
    compute(manager, make_request(list(range(9)), "first"))
    assert manager.get_computed_blocks(make_request(list(range(9)))) == ([], 0)
    assert manager.block_pool.num_cached_blocks == 0


def test_blocks_found_but_free_do_not_count_as_room_for_new_ones() -> None:
    manager = make_manager(num_blocks=4)
    first = make_request(list(range(12)), "first")
    compute(manager, first)
    manager.free(first)
    longer = make_request([*range(12), *range(50, 56)], "longer")
    blocks, found = manager.get_computed_blocks(longer)
    assert (len(blocks), found) == (3, 12)
    assert manager.allocate_slots(longer, 6, blocks) is None
    assert longer.block_ids == []
    assert manager.block_pool.num_free_blocks == 4
    assert manager.allocate_slots(longer, 4, blocks) is not None
    assert manager.block_pool.num_free_blocks == 0


def test_a_prefix_outlives_what_follows_it() -> None:
    manager = make_manager(num_blocks=4)
    first = make_request(list(range(16)), "first")
    compute(manager, first)
    manager.free(first)
    other = make_request([90, 91, 92, 93, 94, 95], "other")
    compute(manager, other)
    assert manager.get_computed_blocks(make_request(list(range(16))))[1] == 8


def test_a_block_that_is_reused_is_no_longer_found() -> None:
    manager = make_manager(num_blocks=2)
    first = make_request(list(range(8)), "first")
    compute(manager, first)
    manager.free(first)
    compute(manager, make_request(list(range(50, 58)), "other"))
    assert manager.get_computed_blocks(make_request(list(range(8)))) == ([], 0)


def test_a_block_filled_by_sampled_tokens_is_cached_too() -> None:
    manager = make_manager()
    first = make_request([1, 2, 3], "first")
    compute(manager, first)
    first.all_token_ids += [4, 5]
    first.num_tokens = 5
    assert manager.allocate_slots(first, 2) != []
    first.num_computed_tokens = 5
    assert first.num_computed_tokens >= first.next_cache_point
    manager.cache_blocks(first)
    assert manager.get_computed_blocks(make_request([1, 2, 3, 4, 9]))[1] == 4


def test_lookahead_takes_room_for_drafts_but_not_beyond_the_model_length() -> None:
    manager = make_manager(max_model_len=10)
    request = make_request(list(range(8)))
    assert len(manager.allocate_slots(request, 8, None, 1) or []) == 3
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 2, None, 50) == []


def test_a_whole_sequence_must_fit_although_only_a_chunk_is_taken() -> None:
    manager = make_manager(num_blocks=3)
    assert manager.allocate_slots(make_request(list(range(13))), 4, whole_sequence_must_fit=True) is None
    request = make_request(list(range(12)))
    assert len(manager.allocate_slots(request, 4, whole_sequence_must_fit=True) or []) == 1


def test_the_cache_is_not_reset_while_blocks_are_held() -> None:
    manager = make_manager()
    first = make_request(list(range(9)), "first")
    compute(manager, first)
    assert not manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request(list(range(9))))[1] == 8
    manager.free(first)
    assert manager.reset_prefix_cache()
    assert manager.block_pool.num_cached_blocks == 0
    assert manager.get_computed_blocks(make_request(list(range(9)))) == ([], 0)


def test_a_request_that_is_freed_holds_nothing_and_can_start_again() -> None:
    manager = make_manager()
    request = make_request(list(range(9)))
    compute(manager, request)
    manager.free(request)
    assert (request.block_ids, request.num_slots, request.num_cached_blocks) == ([], 0, 0)
    assert manager.block_pool.num_free_blocks == 8
    request.num_computed_tokens = 0
    assert compute(manager, request) == 8


def test_a_request_that_nobody_knows_of_is_found_by_the_audit() -> None:
    manager = make_manager()
    first = make_request(list(range(9)), "first")
    compute(manager, first)
    manager.check_integrity([first])
    with pytest.raises(NBEngineError, match="reference count 1, but 0 holders"):
        manager.check_integrity([])


def test_no_slots_are_given_when_too_few_blocks_are_free_and_nothing_changes() -> None:
    manager = make_manager(num_blocks=2)
    request = make_request(list(range(12)))
    assert manager.allocate_slots(request, 12) is None
    assert request.block_ids == []
    assert request.num_slots == 0
    manager.check_integrity([request])
