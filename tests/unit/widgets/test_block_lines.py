"""Lines tell of a block's contents and of the text before it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nbengine.client.observe.trace_mirror import BlockMap, RequestView, TraceMirror
from nbengine.kv_cache.holder import NO_BLOCK
from nbengine.metrics.trace import PROMPT_PREVIEW_TOKENS, RequestAdded
from nbengine.widgets.dashboard.block_lines import MOST_CHARACTERS, MOST_TOKENS_BEFORE, block_lines

SIZE = 4


class Words:
    """A tokenizer that counts what it is asked for."""

    def __init__(self, pattern: str = "{}.") -> None:
        self.pattern = pattern
        self.num_decoded = 0

    def __call__(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return "".join(map(self.pattern.format, token_ids))


def mirror_of(num_tokens: int, *, cached: Sequence[int] | None = None) -> TraceMirror:
    """One running request with blocks in reverse order; of those of `cached` (None: all) the tokens are known."""
    count = num_tokens // SIZE
    mirror = TraceMirror(0)
    mirror.blocks = blocks = BlockMap(count, SIZE)
    preview = list(range(min(num_tokens, PROMPT_PREVIEW_TOKENS)))
    added = RequestAdded(0, "r", 0, 0.0, num_tokens, num_tokens + 1, preview)
    table = list(reversed(range(count)))
    mirror.requests[0] = RequestView(added, "running", num_tokens, block_ids=table)
    blocks.ref_counts[:] = 1
    for position in range(count) if cached is None else cached:
        first = position * SIZE
        blocks.store([table[position]], list(range(first, first + SIZE)), 1)
    return mirror


def name(request: RequestAdded) -> str:
    return f"#{request.number}"


def after(mirror: TraceMirror, position: int, words: Words) -> str | None:
    block = mirror.requests[0].block_ids[position]
    lines = [line for line in block_lines(mirror, block, words, name) if line.startswith("after: ")]
    return lines[0].removeprefix("after: ") if lines else None


@pytest.mark.parametrize("cached", [None, []])
def test_a_short_text_before_a_block_is_shown_whole(cached: list[int] | None) -> None:
    mirror = mirror_of(40, cached=cached)
    assert after(mirror, 0, Words()) is None
    assert after(mirror, 3, Words()) == "0.1.2.3.4.5.6.7.8.9.10.11."


@pytest.mark.parametrize("pattern", ["{}.", "{:1d}", "<{}>"])
def test_a_long_text_is_shown_from_its_end(pattern: str) -> None:
    mirror, words = mirror_of(4000), Words(pattern)
    whole = words(range(3996))
    assert after(mirror, 999, words) == "…" + whole[1 - MOST_CHARACTERS :]


def test_no_more_is_decoded_than_can_be_shown() -> None:
    mirror, words = mirror_of(40_000), Words()
    after(mirror, 9999, words)
    assert words.num_decoded <= MOST_TOKENS_BEFORE + SIZE + 1


def test_tokens_without_text_are_not_a_whole_text() -> None:
    mirror = mirror_of(40_000)
    assert after(mirror, 9999, Words("")) == "…"
    assert after(mirror, 3, Words("")) == ""


def test_what_is_not_known_separates() -> None:
    preview = PROMPT_PREVIEW_TOKENS // SIZE
    mirror = mirror_of(4 * PROMPT_PREVIEW_TOKENS, cached=range(preview + 3, preview + 9))
    first = (preview + 3) * SIZE
    assert after(mirror, preview + 4, Words()) == "".join(f"{token}." for token in range(first, first + SIZE))
    assert after(mirror, preview + 3, Words()) is None
    mirror.blocks.token_ids[mirror.requests[0].block_ids[preview + 5]] = [-1, -1, 7, 8]
    assert after(mirror, preview + 6, Words()) == "7.8."


def test_a_block_of_which_only_the_beginning_is_known_joins_nothing() -> None:
    mirror = mirror_of(40, cached=[3, 4])
    mirror.requests[0].added.prompt_token_ids = list(range(10))
    assert after(mirror, 4, Words()) == "12.13.14.15."
    assert after(mirror, 2, Words()) == "0.1.2.3.4.5.6.7."


def of_two_groups() -> TraceMirror:
    """One running request with ten tokens: of its second group, a window, the first block was given back."""
    mirror = TraceMirror(0)
    mirror.blocks = blocks = BlockMap(8, SIZE, num_tables=2)
    added = RequestAdded(0, "r", 0, 0.0, 10, 16, list(range(10)))
    mirror.requests[0] = RequestView(added, "running", 10)
    blocks.hold(0, table := [6, 1, 5, 2, 4, 3], 0, 1)
    blocks.store([6, 1], [*range(SIZE)] * 2, 1)
    blocks.release([1], 2)
    table[1] = NO_BLOCK
    mirror.requests[0].block_ids = table
    return mirror


def test_a_block_of_one_of_several_groups_says_which_and_its_place_in_the_text() -> None:
    mirror = of_two_groups()

    def lines(block: int) -> list[str]:
        return block_lines(mirror, block, Words(), name)

    assert lines(6) == [
        "block 6: held by a request, cached",
        "request #0, its block 0 of layer group 0: tokens 0 to 3 of 10",
        "holds: 0.1.2.3.",
    ]
    # What the window has passed is still found, and no longer the request's.
    assert lines(1) == [
        "block 1: free, cached",
        "last held by request #0, as its block 0 of layer group 1",
        "holds: 0.1.2.3.",
    ]
    # The text before a block is that of any group that has it.
    assert lines(2) == [
        "block 2: held by a request",
        "request #0, its block 1 of layer group 1: tokens 4 to 7 of 10",
        "holds: 4.5.6.7.",
        "after: 0.1.2.3.",
    ]
    assert lines(3)[1] == "request #0, its block 2 of layer group 1: tokens 8 to 9 of 10"
