"""What is to be said of a KV block: who holds it, where in their texts it lies, what it contains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from nbengine.client.process_usage import printable
from nbengine.client.trace_mirror import RequestView, TraceMirror

MOST_HOLDERS = 8
MOST_CHARACTERS = 160
"""Of each text."""
MOST_TOKENS_BEFORE = 4 * MOST_CHARACTERS
"""That are decoded to show the end of a text: a token is a byte at least, a character four at most."""
MOST_TOKENS = 32
"""That are shown as numbers where there is no tokenizer."""

Decode = Callable[[Sequence[int]], str | None]


def block_lines(mirror: TraceMirror | None, block: int, decode: Decode) -> list[str]:
    """Lines of plain text. `decode` gives the text of tokens, None where there is no tokenizer."""
    blocks = None if mirror is None else mirror.blocks
    if mirror is None or blocks is None or not 0 <= block < blocks.num_blocks:
        return [f"there is no block {block}"]
    holders = mirror.holders(block)
    lines = [f"block {block}: {_condition(int(blocks.ref_counts[block]), bool(blocks.cached[block]))}"]
    for number in holders[:MOST_HOLDERS]:
        lines.append(_place(mirror.requests[number], block, blocks.block_size))
    if len(holders) > MOST_HOLDERS:
        lines.append(f"and {len(holders) - MOST_HOLDERS} more requests")
    if not holders:
        lines += _last_holder(mirror, block)
    view = mirror.requests[holders[0]] if holders else None
    return [*lines, *_contents(mirror, view, block, decode)]


def token_text(token_ids: Sequence[int], decode: Decode) -> str:
    """The text of tokens in one line, or the tokens as numbers."""
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


def _place(view: RequestView, block: int, block_size: int) -> str:
    position = view.block_ids.index(block)
    first = position * block_size
    known = view.added.num_prompt_tokens + view.num_output_tokens
    last = max(first, min(first + block_size, known) - 1)
    tokens = f"tokens {first} to {last} of {known}" if known > first else "for tokens to come"
    return f"request {printable(view.added.request_id)}, its block {position}: {tokens}"


def _last_holder(mirror: TraceMirror, block: int) -> list[str]:
    number = int(mirror.blocks.holder[block])
    if number < 0:
        return ["nobody has held it"]
    view = mirror.finished.get(number) or mirror.requests.get(number)
    name = f"request {number}" if view is None else f"request {printable(view.added.request_id)}"
    return [f"last held by {name}, as its block {int(mirror.blocks.position[block])}"]


def _contents(mirror: TraceMirror, view: RequestView | None, block: int, decode: Decode) -> list[str]:
    prompt, position = ([], 0) if view is None else (view.added.prompt_token_ids, view.block_ids.index(block))
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
    """The tokens before a place in a request's table, backwards as far as they are known without a gap."""
    prompt = view.added.prompt_token_ids
    for earlier in reversed(range(position)):
        for token in reversed(_tokens(mirror, view.block_ids[earlier], prompt, earlier)):
            if token < 0:
                return
            yield token


def _tokens(mirror: TraceMirror, block: int, prompt: Sequence[int], position: int) -> list[int]:
    """The tokens of a block, -1 for those that are not known: of one that is not cached all but the prompt's beginning."""
    if mirror.blocks.cached[block]:
        known: list[int] = mirror.blocks.token_ids[block].tolist()
        return known
    size = mirror.blocks.block_size
    tokens = prompt[position * size : (position + 1) * size]
    return [*tokens, *[-1] * (size - len(tokens))]


def _head(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _tail(text: str, *, is_cut: bool) -> str:
    return "…" + text[1 - MOST_CHARACTERS :] if is_cut or len(text) > MOST_CHARACTERS else text
