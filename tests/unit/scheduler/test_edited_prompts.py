"""An edited prompt of a hybrid model computes few tokens again: they are counted."""

from __future__ import annotations

import pytest

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.kv_cache.specs import FULL, LayerRule, make_groups
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.request import Request
from nbengine.scheduler.scheduler import Scheduler
from tests.unit.scheduler.short_histories import answer

LENGTH, BLOCK_SIZE = 1000, 16


def make_scheduler(num_slots: int, max_num_seqs: int = 8) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512),
        CacheConfig(block_size=BLOCK_SIZE),
        4000,
        2048,
        options=SchedulerOptions(
            groups=make_groups([LayerRule("recurrent", 8), FULL]), num_state_slots=num_slots
        ),
    )


def computed_tokens(scheduler: Scheduler, prompt: list[int]) -> int:
    """Run a prompt to its first token, and return how many of its tokens were computed."""
    request = Request(f"r{scheduler.step_counter}", prompt, SamplingParams(max_tokens=1))
    scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        answer(scheduler, scheduler.schedule())
    return LENGTH - request.num_cached_tokens


def edited(prompt: list[int], place: int, token: int) -> list[int]:
    return [*prompt[:place], token, *prompt[place + 1 :]]


@pytest.mark.parametrize("place", [300, 500, 980])
def test_the_second_edit_of_a_place_computes_no_more_than_with_full_attention(place: int) -> None:
    scheduler, prompt = make_scheduler(33), list(range(10, 10 + LENGTH))
    with_full_attention = LENGTH - place // BLOCK_SIZE * BLOCK_SIZE
    assert computed_tokens(scheduler, prompt) == LENGTH
    assert computed_tokens(scheduler, edited(prompt, place, 1)) < with_full_attention + 64
    assert computed_tokens(scheduler, edited(prompt, place, 2)) == with_full_attention
    assert computed_tokens(scheduler, edited(prompt, place, 3)) == with_full_attention


def test_the_second_edit_is_as_quick_where_few_slots_keep_regular_checkpoints_apart() -> None:
    scheduler, prompt = make_scheduler(12), list(range(10, 10 + LENGTH))
    counts = [computed_tokens(scheduler, edited(prompt, 500, token)) for token in range(4)]
    assert counts == [LENGTH, 744, 504, 504]


def test_a_prompt_is_found_again_after_many_others_have_taken_the_slots_of_its_regular_checkpoints() -> None:
    scheduler = make_scheduler(33)
    first = list(range(10, 10 + LENGTH))
    computed_tokens(scheduler, first)
    for number in range(1, 7):
        computed_tokens(scheduler, list(range(10_000 * number, 10_000 * number + LENGTH)))
    assert computed_tokens(scheduler, first) == 8


def test_a_prefix_is_found_while_as_many_requests_run_as_may() -> None:
    scheduler = make_scheduler(num_slots=4, max_num_seqs=12)
    beginning = list(range(10, 90))
    found = []
    for number in range(12):
        request = Request(f"r{number}", [*beginning, 200 + number], SamplingParams(max_tokens=8))
        scheduler.add_request(request)
        found.append(request)
    while scheduler.has_unfinished_requests():
        answer(scheduler, scheduler.schedule())
        scheduler.check_integrity()
        assert len(scheduler.running) <= 3
    assert sum(request.num_cached_tokens == 80 for request in found) == 9
