"""Block hashes: equal exactly for equal prefixes under equal extra keys."""

from __future__ import annotations

import struct
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.errors import RequestError
from nbengine.kv_cache.prefix import BlockHasher, ExtraKeys

tokens_strategy = st.lists(st.integers(0, 3), max_size=24)
keys_strategy = st.sampled_from(
    [(), (("cache_salt", ""),), (("cache_salt", "a"),), (("lora", "a"),), (("lora", 1),), (("lora", "1"),)]
)


def hashes_of(tokens: list[int], extra_keys: ExtraKeys = (), block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(block_size).extend(hashes, tokens, extra_keys)
    return hashes


@given(first=tokens_strategy, second=tokens_strategy, first_keys=keys_strategy, second_keys=keys_strategy)
def test_two_blocks_hash_alike_exactly_when_their_whole_prefixes_are_alike(
    first: list[int], second: list[int], first_keys: ExtraKeys, second_keys: ExtraKeys
) -> None:
    for i, one in enumerate(hashes_of(first, first_keys)):
        for j, other in enumerate(hashes_of(second, second_keys)):
            alike = first_keys == second_keys and first[: 4 * (i + 1)] == second[: 4 * (j + 1)]
            assert (one == other) == alike


@given(st.data())
def test_what_tokens_stand_for_counts_like_the_tokens_themselves(data: st.DataObject) -> None:
    """Rows of one byte each stand for the first tokens (zeros), plain tokens follow."""
    hasher = BlockHasher(4)
    sides = []
    for _ in range(2):
        rows = bytes(data.draw(st.lists(st.integers(0, 1), max_size=12)))
        tokens = [0] * len(rows) + data.draw(st.lists(st.integers(0, 1), max_size=12))
        content = hasher.digests(memoryview(rows), len(rows))
        hashes: list[bytes] = []
        hasher.extend(hashes, tokens, (), content)
        # What a position holds: a row, or a token.
        sides.append((hashes, [("row", row) for row in rows] + [("token", t) for t in tokens[len(rows) :]]))
    (first, first_says), (second, second_says) = sides
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            assert (one == other) == (first_says[: 4 * (i + 1)] == second_says[: 4 * (j + 1)])


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), cuts=st.lists(st.integers(0, 40)))
def test_hashing_as_the_tokens_grow_gives_what_hashing_at_once_gives(
    tokens: list[int], cuts: list[int]
) -> None:
    hashes: list[bytes] = []
    hasher = BlockHasher(4)
    for cut in [*sorted(cuts), len(tokens)]:
        hasher.extend(hashes, tokens[:cut])
        assert len(hashes) == len(tokens[:cut]) // 4
    assert hashes == hashes_of(tokens)


def test_only_full_blocks_have_a_hash() -> None:
    assert len(hashes_of(list(range(11)), block_size=4)) == 2
    assert hashes_of([1, 2, 3], block_size=4) == []


def test_a_hash_is_sha256_over_the_tokens_and_the_hash_before_them() -> None:
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])
    root = sha256(b"()").digest()
    assert first == sha256(struct.pack("=4I", 1, 2, 3, 4) + root).digest()
    assert second == sha256(struct.pack("=4I", 5, 6, 7, 8) + first).digest()


@pytest.mark.parametrize("token", [-1, 2**32, "a", 1.5, None])
def test_what_is_not_a_token_id_is_refused_for_that_request(token: object) -> None:
    with pytest.raises(RequestError, match="token id"):
        hashes_of([1, 2, 3, token])  # type: ignore[list-item]
