"""Slots for recurrent states, and the places at which checkpoints are made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.errors import NBEngineError
from nbengine.kv_cache.checkpoints import CheckpointRule
from nbengine.kv_cache.manager import KVCacheManager
from nbengine.kv_cache.prefix import BlockHasher
from nbengine.kv_cache.request_states import RequestStates
from nbengine.kv_cache.specs import FULL, LayerRule, make_groups
from nbengine.kv_cache.state_pool import StatePool
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.request import Request


def test_a_checkpoint_that_a_step_starts_from_is_not_overwritten_in_that_step() -> None:
    pool = StatePool(2)
    for name in (b"a", b"b"):
        slot = pool.take()
        assert slot is not None
        pool.keep(slot, name)
    assert pool.pin(b"a") == 0
    # The least recently used one is pinned, the other is given out.
    assert pool.take() == 1
    assert pool.take() is None
    assert not pool.can_take()
    pool.begin_step()
    assert pool.take() == 0
    assert pool.find(b"a") is None


def test_a_slot_is_there_only_if_it_is_not_the_one_to_start_from() -> None:
    pool = StatePool(1)
    slot = pool.take()
    assert slot == 0
    pool.keep(slot, b"a")
    assert pool.can_take()
    assert not pool.can_take(b"a")


def test_checkpoints_go_in_the_order_of_their_last_use() -> None:
    pool = StatePool(3)
    for name in (b"a", b"b", b"c"):
        slot = pool.take()
        assert slot is not None
        pool.keep(slot, name)
    pool.touch(b"a")
    assert [pool.take(), pool.take()] == [1, 2]
    assert pool.find(b"a") == 0


def filled(*worths: int) -> StatePool:
    """Return a pool full of checkpoints of these worths, whose names are their numbers."""
    pool = StatePool(len(worths))
    for number, worth in enumerate(worths):
        slot = pool.take(worth)
        assert slot is not None
        pool.keep(slot, bytes([number]), worth)
    return pool


def left(pool: StatePool, num_worths: int) -> list[int]:
    return [number for number in range(num_worths) if pool.find(bytes([number])) is not None]


def test_checkpoints_of_little_worth_go_first_so_that_those_of_a_long_prompt_get_sparse_evenly() -> None:
    places = CheckpointRule.of(16, 100, 0).places(512, 0, 500)
    assert list(places) == [64, 128, 192, 256, 320, 384, 448, 496]
    pool = filled(*places.values())
    for _ in range(4):
        pool.take()
    assert [list(places)[number] for number in left(pool, 8)] == [128, 256, 384, 496]
    pool.take()
    pool.take()
    assert [list(places)[number] for number in left(pool, 8)] == [256, 496]


def test_a_checkpoint_is_not_made_in_place_of_one_that_is_worth_more() -> None:
    pool = filled(64, 1024)
    assert pool.take(64) == 0
    assert pool.take(64) is None
    # A running request takes it all the same.
    assert pool.take() == 1


def test_the_most_valuable_checkpoint_goes_when_it_was_of_no_use_for_long() -> None:
    pool, rounds = filled(1000, 100, 100), 0
    while pool.find(bytes([0])) is not None:
        slot = pool.take(100)
        assert slot is not None
        pool.keep(slot, f"{rounds}".encode(), 100)
        rounds += 1
    # Ten times as long as one of a tenth of its worth, of which two fit beside it.
    assert 20 <= rounds <= 22


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=60), st.integers(1, 6))
def test_the_checkpoint_with_the_least_credit_goes_whatever_was_used_before(
    uses: list[tuple[int, int]], size: int
) -> None:
    pool, credits, spent = StatePool(size), dict[int, list[int]](), 0
    for name, power in uses:
        worth, key = 2**power, bytes([name])
        if name in credits:
            worth = max(worth, credits.pop(name)[1])
            pool.touch(key, worth)
            credits[name] = [spent + worth, worth]
            continue
        if len(credits) == size:
            first = min(credits, key=credits.__getitem__)
            if spent + worth < credits[first][0]:
                assert pool.take(worth) is None
                continue
            spent = max(spent, credits.pop(first)[0])
        slot = pool.take(worth)
        assert slot is not None
        pool.keep(slot, key, worth)
        credits[name] = [spent + worth, worth]
        assert {each for each in range(10) if pool.find(bytes([each])) is not None} == credits.keys()
        pool.check_integrity([])


def test_an_equal_state_gives_its_slot_back() -> None:
    pool = StatePool(2)
    for _ in range(2):
        slot = pool.take()
        assert slot is not None
        pool.keep(slot, b"a")
    assert (pool.num_free_slots, pool.num_checkpoints) == (2, 1)
    pool.check_integrity([])


def test_a_lost_slot_is_noticed() -> None:
    pool = StatePool(2)
    pool.take()
    with pytest.raises(NBEngineError, match="2 slots"):
        pool.check_integrity([])
    assert not pool.forget_all()


def test_a_prompt_has_checkpoints_at_regular_places_and_dense_ones_near_its_end() -> None:
    assert list(CheckpointRule.of(16, 1000, 0).places(1000, 0, 1000)) == [*range(64, 1000, 64), 992]
    # With fewer slots they are farther apart, but not near the end.
    few = CheckpointRule.of(16, 6, 0).places(1000, 0, 1000)
    assert sorted(few) == [256, 512, 768, 864, 928, 992]
    # Nothing is at the end of the whole prompt, from which nobody could sample.
    assert max(CheckpointRule.of(16, 6, 0).places(1024, 0, 1024)) == 1024
    assert 1008 in CheckpointRule.of(16, 6, 0).places(1024, 0, 1024)


def test_a_state_that_weighs_little_is_kept_as_often_as_tokens_weigh_as_much() -> None:
    assert [CheckpointRule.of(16, 9, tokens).finest for tokens in (0, 1, 16, 17, 48, 64, 700)] == [
        *(64, 16, 16, 32, 48, 64, 64)
    ]
    assert CheckpointRule.of(128, 9, 1).finest == 128


def test_a_place_where_paths_parted_is_kept_and_worth_as_much_as_the_end() -> None:
    rule = CheckpointRule.of(16, 0, 0)
    places = rule.places(1000, 0, 1000, fork=496)
    assert places[496] == 4 * 256
    assert places[992] == 4 * 512
    assert 496 not in rule.places(1000, 0, 1000)
    # It is not made again, nor beyond the end of the prompt.
    assert 496 not in rule.places(1000, 496, 1000, fork=496)
    assert 496 not in rule.places(400, 0, 600, fork=496)


def test_an_edit_anywhere_computes_at_most_what_lies_behind_it_and_the_finest_distance() -> None:
    places = CheckpointRule.of(16, 1000, 0).places(1000, 0, 1000)
    for edited in range(64, 1000):
        start = max(place for place in places if place <= edited)
        assert edited - start < 64


def test_an_edit_near_the_end_computes_at_most_little_more_than_twice_what_lies_behind_it() -> None:
    places = CheckpointRule.of(16, 3, 0).places(1000, 0, 1000)
    for edited in range(500, 1000):
        start = max((place for place in places if place <= edited), default=0)
        assert 1000 - start <= 2 * (1000 - edited) + 64 + 2 * 16


@given(
    st.integers(1, 32),
    st.integers(1, 2000),
    st.lists(st.integers(1, 300), min_size=1),
    st.integers(0, 40),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 2000),
)
def test_places_do_not_depend_on_how_a_prompt_is_divided_into_steps(
    block_size: int, length: int, steps: list[int], spare: int, tokens: int, fork: int, prompt: int
) -> None:
    rule, fork = CheckpointRule.of(block_size, spare, tokens), fork * block_size
    prompt = max(1, min(prompt, length))
    whole, pieces, start = rule.places(prompt, 0, length, fork), {}, 0
    while start < length:
        for step in steps:
            end = min(start + step, length)
            pieces |= rule.places(prompt, start, end, fork)
            start = end
    assert pieces == whole
    assert all(place % block_size == 0 and 0 < place <= length for place in whole)
    assert all(worth > 0 for worth in whole.values())


@given(st.integers(1, 64), st.integers(1, 100_000), st.integers(0, 500), st.integers(0, 100))
def test_regular_checkpoints_of_a_request_take_at_most_three_quarters_of_the_spare_slots(
    block_size: int, length: int, spare: int, tokens: int
) -> None:
    rule = CheckpointRule.of(block_size, spare, tokens)
    spacing = rule.spacing(length)
    assert spacing % block_size == 0
    assert length // spacing <= spare * 3 / 4


class States:
    """Requests whose states are in a pool of some slots, and steps that compute their tokens."""

    def __init__(self, num_slots: int, num_spare: int) -> None:
        self.hasher = BlockHasher(4)
        self.pool = StatePool(num_slots)
        self.states = RequestStates(self.pool, num_spare, CheckpointRule(4, 4, 100), self.hasher)
        self.running: list[Request] = []

    def begin(self, name: str, length: int) -> Request | None:
        request = Request(name, list(range(length)), SamplingParams(), block_hasher=self.hasher)
        if not self.states.begin(request, 0):
            return None
        self.running.append(request)
        return request

    def compute(self, *steps: tuple[Request, int]) -> list[tuple[str, int]]:
        for request, count in steps:
            request.num_computed_tokens += count
        return [(request.request_id, place) for request, place, _ in self.states.plan(steps)]

    def end(self, request: Request) -> None:
        self.states.end(request)
        self.running.remove(request)

    def check(self) -> None:
        self.states.check_integrity(self.running)


def test_checkpoints_whose_tokens_are_never_known_give_their_slots_back() -> None:
    case = States(8, 4)
    request = case.begin("a", 7)
    assert request is not None
    # Its first token is in flight, and so is the state after it.
    assert [*case.compute((request, 7)), *case.compute((request, 1))] == [("a", 4), ("a", 8)]
    case.states.begin_step()
    case.check()
    assert case.pool.num_checkpoints == 1
    case.end(request)
    case.check()
    assert (case.pool.num_free_slots, case.pool.num_checkpoints) == (8, 1)
    case.states.begin_step()
    case.check()
    assert case.pool.num_checkpoints == 1


def test_what_a_damaged_request_has_made_gives_its_slots_back_and_is_not_found() -> None:
    case = States(8, 4)
    request = case.begin("a", 7)
    assert request is not None
    case.compute((request, 7))
    case.compute((request, 1))
    case.states.forget(request)
    case.check()
    assert (case.pool.num_free_slots, case.pool.num_checkpoints) == (7, 0)
    case.states.begin_step()
    case.end(request)
    case.check()
    assert (case.pool.num_free_slots, case.pool.num_checkpoints) == (8, 0)


def test_checkpoints_of_a_request_that_has_ended_are_waited_for_by_nobody() -> None:
    case = States(8, 4)
    request = case.begin("a", 7)
    assert request is not None
    case.compute((request, 7))
    case.running.remove(request)
    with pytest.raises(NBEngineError, match="0 requests have slots"):
        case.check()


def test_requests_that_run_leave_slots_for_checkpoints() -> None:
    case = States(4, 2)
    first, second = case.begin("a", 9), case.begin("b", 9)
    assert first is not None
    assert second is not None
    assert case.states.num_admissible == 0
    assert case.begin("c", 9) is None
    case.end(first)
    assert case.begin("c", 9) is not None
    case.check()


def test_a_step_with_too_few_slots_makes_the_checkpoints_that_are_worth_most_and_each_once() -> None:
    case = States(5, 3)
    first, second = case.begin("a", 9), case.begin("b", 17)
    assert first is not None
    assert second is not None
    # 16 is the end of the longer prompt, and 8 that of the shorter one and a beginning of both.
    assert case.compute((first, 9), (second, 17)) == [("a", 4), ("a", 8), ("b", 16)]


def test_the_checkpoint_at_a_block_that_is_gone_is_gone() -> None:
    manager = KVCacheManager(
        4, 4, 100, True, make_groups([FULL, LayerRule("recurrent", 8)]), num_slots=8, num_spare_slots=6
    )
    states = manager.states
    assert states is not None
    request = Request("a", list(range(13)), SamplingParams(), block_hasher=manager.block_hasher)
    assert manager.allocate_slots(request, 13) is not None
    request.num_computed_tokens = 13
    assert [place for _, place, _ in states.plan([(request, 13)])] == [12]
    manager.cache_blocks(request)
    manager.free(request)
    assert states.pool.num_checkpoints == 1
    other = Request("b", list(range(50, 56)), SamplingParams(), block_hasher=manager.block_hasher)
    assert manager.allocate_slots(other, 6) is not None
    # The last block of the prompt was the first to go.
    assert states.pool.num_checkpoints == 0
    assert request.block_hashes[0] in manager.block_pool.cached_blocks()
    manager.check_integrity([other])
