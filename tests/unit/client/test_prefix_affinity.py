"""The guess which rank has a prompt's first blocks is compared with sets that are kept in full."""

from __future__ import annotations

import random

from nbengine.client.routing.prefix_affinity import MAX_BLOCKS, PrefixAffinity
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.kv_cache.prefix import BlockHasher
from nbengine.sampling_params import SamplingParams

BLOCK = 4


def request(tokens: list[int], salt: str | None = None, embeds: object = None) -> EngineCoreRequest:
    return EngineCoreRequest("r", tokens, SamplingParams(), cache_salt=salt, prompt_embeds=embeds)


def affinity(*ranks: int, num_blocks: int = 100) -> PrefixAffinity:
    made = PrefixAffinity(BLOCK)
    for rank in ranks:
        made.set_bound(rank, num_blocks)
    return made


def test_the_hashes_are_those_of_the_engine_cores_and_only_of_the_first_blocks() -> None:
    tokens = list(range(BLOCK * (MAX_BLOCKS + 5)))
    expected: list[bytes] = []
    BlockHasher(BLOCK).extend(expected, tokens, (("cache_salt", "s"),))
    assert affinity().hashes(request(tokens, "s")) == expected[:MAX_BLOCKS]
    assert affinity().hashes(request(tokens[:6])) != affinity().hashes(request(tokens[:6], "s"))
    assert len(affinity().hashes(request(tokens[: 2 * BLOCK + 3]))) == 2
    assert affinity().hashes(request(tokens, embeds=[[1.0]])) == []
    # The engine core refuses it, and says so.
    assert affinity().hashes(request([-1] * BLOCK)) == []


def test_the_rank_with_the_longest_start_is_the_best() -> None:
    known = affinity(0, 1, 2)
    tokens = list(range(40))
    known.sent(known.hashes(request(tokens[:8])), 0)
    known.sent(known.hashes(request(tokens[:20])), 2)
    hashes = known.hashes(request(tokens))
    assert known.best(hashes, [0, 1, 2]) == 2
    assert known.best(hashes, [0, 1]) == 0
    assert known.best(hashes, [1]) is None
    assert known.best(known.hashes(request([7, *tokens])), [0, 1, 2]) is None
    assert known.best([], [0, 1, 2]) is None


def test_a_rank_that_starts_again_or_goes_is_forgotten() -> None:
    known = affinity(0, 1)
    hashes = known.hashes(request(list(range(20))))
    known.sent(hashes, 0)
    known.sent(hashes, 1)
    known.set_bound(1, 100)
    assert known.best(hashes, [0, 1]) == 0
    known.forget(0)
    assert known.best(hashes, [0, 1]) is None
    assert len(known) == 0
    known.sent(hashes, 0)
    assert len(known) == 0


def test_entries_are_bounded_by_the_ranks_blocks_and_the_oldest_go_first() -> None:
    known = affinity(0, num_blocks=6)
    prompts = [request([first] * 16) for first in range(3)]
    for prompt in prompts:
        known.sent(known.hashes(prompt), 0)
    assert len(known) == 6
    assert known.best(known.hashes(prompts[0]), [0]) is None
    # Of the second prompt the first blocks have stayed, as in the cache, where the last ones go first.
    assert known.best(known.hashes(prompts[1])[:2], [0]) == 0
    assert known.best(known.hashes(prompts[2]), [0]) == 0


def test_it_agrees_with_sets_that_are_kept_in_full() -> None:
    chance = random.Random(1)
    known = affinity(*range(4), num_blocks=10_000)
    everything: dict[int, set[bytes]] = {rank: set() for rank in range(4)}
    for _ in range(500):
        prompt = request([chance.randrange(2) for _ in range(chance.randrange(30))])
        hashes = known.hashes(prompt)
        lengths = {}
        for rank, blocks in everything.items():
            lengths[rank] = next((i for i, block in enumerate(hashes) if block not in blocks), len(hashes))
        best = known.best(hashes, range(4))
        longest = max(lengths.values())
        assert (best is None) == (longest == 0)
        assert best is None or lengths[best] == longest
        rank = chance.randrange(4)
        known.sent(hashes, rank)
        everything[rank].update(hashes)
