"""The description of a KV block: its holders, its place in their texts, and its contents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from nbengine.client.observe.process_usage import printable
from nbengine.client.observe.trace_mirror import BlockMap, RequestView, TraceMirror
from nbengine.metrics.trace import RequestAdded

MOST_HOLDERS = 8
MOST_CHARACTERS = 160
"""The most characters of each text."""
MOST_TOKENS_BEFORE = 4 * MOST_CHARACTERS
"""The most tokens decoded for the end of a text: a token is a byte at least, a character four at most."""
MOST_TOKENS = 32
"""The most tokens that are shown as numbers where there is no tokenizer."""

Decode = Callable[[Sequence[int]], str | None]
Name = Callable[[RequestAdded], str]


def block_lines(mirror: TraceMirror | None, block: int, decode: Decode, name: Name) -> list[str]:
    """Describe a block in lines of plain text.

    Args:
        mirror: the state of the block's engine core.
        block: its number.
        decode: the text of tokens, None where there is no tokenizer.
        name: the name of a request, in plain text.
    """
    blocks = None if mirror is None else mirror.blocks
    if mirror is None or blocks is None or not 0 <= block < blocks.num_blocks:
        return [f"there is no block {block}"]
    holders = mirror.holders(block)
    lines = [f"block {block}: {_condition(int(blocks.ref_counts[block]), bool(blocks.cached[block]))}"]
    for number in holders[:MOST_HOLDERS]:
        lines.append(_place(mirror.requests[number], block, blocks, name))
    if len(holders) > MOST_HOLDERS:
        lines.append(f"and {len(holders) - MOST_HOLDERS} more requests")
    if not holders:
        lines += _last_holder(mirror, block, name)
    view = mirror.requests[holders[0]] if holders else None
    return [*lines, *_contents(mirror, view, block, decode)]


def token_text(token_ids: Sequence[int], decode: Decode) -> str:
    """Return the text of tokens in one line, or the tokens as numbers."""
    text = decode(token_ids)
    if text is None:
        shown = ", ".join(map(str, token_ids[:MOST_TOKENS]))
        return f"tokens {shown}{', …' if len(token_ids) > MOST_TOKENS else ''}"
    return printable(text.replace("\n", "⏎"))


def _condition(references: int, is_cached: bool) -> str:
    if references > 1:
        state = f"shared by {references} requests"
    else:
        state = "held by a request" if references else "free"
    return f"{state}, cached" if is_cached else state


def _place(view: RequestView, block: int, blocks: BlockMap, name: Name) -> str:
    place, block_size = view.block_ids.index(block), blocks.block_size
    first = place // blocks.num_tables * block_size
    known = view.added.num_prompt_tokens + view.num_output_tokens
    last = max(first, min(first + block_size, known) - 1)
    tokens = f"tokens {first} to {last} of {known}" if known > first else "for tokens to come"
    return f"request {name(view.added)}, its {_numbered(place, blocks)}: {tokens}"


def _numbered(place: int, blocks: BlockMap) -> str:
    """Name a block by its place in a request's tables."""
    column, group = divmod(place, blocks.num_tables)
    return f"block {column}" if blocks.num_tables == 1 else f"block {column} of layer group {group}"


def _last_holder(mirror: TraceMirror, block: int, name: Name) -> list[str]:
    number = int(mirror.blocks.holder[block])
    if number < 0:
        return ["nobody has held it"]
    view = mirror.finished.get(number) or mirror.requests.get(number)
    who = f"#{number}" if view is None else name(view.added)
    return [
        f"last held by request {who}, as its {_numbered(int(mirror.blocks.position[block]), mirror.blocks)}"
    ]


def _contents(mirror: TraceMirror, view: RequestView | None, block: int, decode: Decode) -> list[str]:
    prompt: Sequence[int] = []
    position = 0
    if view is not None:
        prompt = view.added.prompt_token_ids
        position = view.block_ids.index(block) // mirror.blocks.num_tables
    own = [token for token in _tokens(mirror, block, prompt, position) if token >= 0]
    if not own:
        return []
    lines = [f"holds: {_head(token_text(own, decode))}"]
    if view is None:
        return lines
    nearest_first = _tokens_before(mirror, view, position)
    before = list(itertools.islice(nearest_first, MOST_TOKENS_BEFORE))[::-1]
    if before and decode(before[:1]) is not None:
        is_cut = next(nearest_first, None) is not None
        lines.append(f"after: {_tail(token_text(before, decode), is_cut=is_cut)}")
    return lines


def _tokens_before(mirror: TraceMirror, view: RequestView, position: int) -> Iterator[int]:
    """Yield the tokens before a request's block of this number, backwards until the first unknown one."""
    prompt, num_tables = view.added.prompt_token_ids, mirror.blocks.num_tables
    for earlier in reversed(range(position)):
        # Every table has the same tokens, as far as no window has passed them.
        column = view.block_ids[earlier * num_tables : (earlier + 1) * num_tables]
        for token in reversed(_tokens(mirror, max(column), prompt, earlier)):
            if token < 0:
                return
            yield token


def _tokens(mirror: TraceMirror, block: int, prompt: Sequence[int], position: int) -> list[int]:
    """Return the tokens of a block, -1 for unknown ones: if it is not cached, all but the prompt's."""
    if block >= 0 and mirror.blocks.cached[block]:
        known: list[int] = mirror.blocks.token_ids[block].tolist()
        return known
    size = mirror.blocks.block_size
    tokens = prompt[position * size : (position + 1) * size]
    return [*tokens, *[-1] * (size - len(tokens))]


def _head(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _tail(text: str, *, is_cut: bool) -> str:
    return "…" + text[1 - MOST_CHARACTERS :] if is_cut or len(text) > MOST_CHARACTERS else text
