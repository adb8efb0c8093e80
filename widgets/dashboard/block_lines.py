"""What is to be said of a KV block: who holds it, where in their texts it lies, what it contains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbengine.client.process_usage import printable
from nbengine.client.trace_mirror import RequestView, TraceMirror

MOST_HOLDERS = 8
MOST_CHARACTERS = 160
"""Of each text."""
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
    own = _tokens(mirror, view, block)
    if not own:
        return []
    lines = [f"holds: {_head(token_text(own, decode))}"]
    if view is None:
        return lines
    before: list[int] = []
    for earlier in view.block_ids[: view.block_ids.index(block)]:
        tokens = _tokens(mirror, view, earlier)
        if not tokens:
            # What is not known would make one text of two.
            before = []
        before += tokens
    if before and decode(before[:1]) is not None:
        lines.append(f"after: {_tail(token_text(before, decode))}")
    return lines


def _tokens(mirror: TraceMirror, view: RequestView | None, block: int) -> list[int]:
    """The tokens of a block as far as they are known: of a cached one all, else those of the prompt's beginning."""
    known: list[int] = mirror.blocks.token_ids[block].tolist() if mirror.blocks.cached[block] else []
    if known or view is None:
        return [token for token in known if token >= 0]
    size = mirror.blocks.block_size
    first = view.block_ids.index(block) * size
    return list(view.added.prompt_token_ids[first : first + size])


def _head(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _tail(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else "…" + text[1 - MOST_CHARACTERS :]
