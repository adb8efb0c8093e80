"""The messages about a tree of answers between the kernel and the script that shows tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from nbengine.errors import NBEngineError
from nbengine.magics.generation.render import branch_footer
from nbengine.magics.tokens.branch import Branch
from nbengine.magics.tokens.branching import BranchTree
from nbengine.outputs import Logprob
from nbengine.widgets.tokens.cells import (
    Alternative,
    TokenCell,
    alternatives_of,
    label_of,
    percent,
    shade,
    token_cells,
)

EAGER_ALTERNATIVES = 5
"""The number of alternatives that are sent with each token; the others are sent when a token is looked at."""
_KEPT_ALTERNATIVES = 5000
"""The most alternatives that a saved notebook keeps of one output."""
Frame = dict[str, Any]


class _Hello(msgspec.Struct, tag_field="kind", tag="hello"):
    pass


class _Alternatives(msgspec.Struct, tag_field="kind", tag="alternatives"):
    node: int
    position: int


class _Branch(msgspec.Struct, tag_field="kind", tag="branch"):
    node: int
    position: int
    token: int


class _Stop(msgspec.Struct, tag_field="kind", tag="stop"):
    node: int


class _Rest(msgspec.Struct, tag_field="kind", tag="rest"):
    pass


class Widget(Protocol):
    """The part of `TokensWidget` that the feed uses."""

    snapshot: Frame

    def send(self, content: Frame) -> None:
        """Send a message to the script."""


class TokensFeed:
    """A feed that keeps the script up to date; safe on any thread, since messages are sent in order."""

    def __init__(
        self,
        tree: BranchTree,
        widget: Widget,
        *,
        footer: bool,
        folded: bool = False,
        on_hello: Callable[[], None],
        on_rest: Callable[[], None],
    ) -> None:
        self._tree = tree
        self._widget = widget
        self._footer = footer
        self._folded = folded
        self._on_hello = on_hello
        self._on_rest = on_rest
        self._lock = threading.RLock()
        self._is_closed = False
        self._sent: dict[int, int] = {}

    def push(self, branch: Branch) -> None:
        """Send what is new of an answer, and store the snapshot at its end."""
        with self._lock:
            if self._is_closed:
                return
            start = self._sent.get(branch.id, 0)
            self._widget.send({"kind": "node", **self._node(branch, start)})
            if branch.done:
                self._widget.snapshot = self._reset(is_news=False)

    def close(self) -> None:
        """Ignore everything from now on: the widget is about to be closed."""
        with self._lock:
            self._is_closed = True

    def receive(self, content: object) -> None:
        """Do what the script asks for.

        Raises:
            msgspec.ValidationError: the content is nothing that the script sends.
        """
        request = msgspec.convert(content, _Hello | _Rest | _Alternatives | _Branch | _Stop)
        if self._is_closed:
            return
        if isinstance(request, _Hello):
            with self._lock:
                self._send(self._reset(is_news=True))
            self._on_hello()
            return
        if isinstance(request, _Rest):
            self._on_rest()
            return
        node = self._tree[request.node]
        if isinstance(request, _Stop):
            node.cancel()
        elif isinstance(request, _Alternatives):
            self._send_alternatives(node, request.position)
        else:
            self._begin(node, request.position, request.token)

    def _begin(self, node: Branch, position: int, token_id: int) -> None:
        existing = self._tree.existing(node, position, token_id)
        try:
            branch = existing or node.branch(position, token_id)
        except NBEngineError as error:
            text = getattr(error, "cause", str(error))
            self._send({"kind": "notice", "node": node.id, "text": f"{type(error).__name__}: {text}"})
            return
        self._send({"kind": "select", "node": branch.id})

    def _send(self, content: Frame) -> None:
        with self._lock:
            if not self._is_closed:
                self._widget.send(content)

    def _send_alternatives(self, node: Branch, position: int) -> None:
        entries = node.logprobs or []
        found = [
            _alternative(alternative)
            for alternative in alternatives_of(entries[position], len(entries[position]))
        ]
        self._send({"kind": "alternatives", "node": node.id, "position": position, "alternatives": found})

    def _reset(self, *, is_news: bool) -> Frame:
        """Describe the whole tree; `is_news`: the script receives it, and later messages continue it."""
        most = EAGER_ALTERNATIVES if is_news else kept_alternatives(self._tree)
        nodes = [self._node(branch, 0, most, count=is_news) for branch in self._tree]
        return {"kind": "reset", "refusal": self._tree.origin.refusal, "nodes": nodes}

    def _node(
        self, branch: Branch, start: int, most: int = EAGER_ALTERNATIVES, *, count: bool = True
    ) -> Frame:
        token_ids, entries = branch.own_token_ids, branch.own_logprobs
        cells = token_cells(token_ids[start:], entries[start:], most)
        if count:
            self._sent[branch.id] = start + len(cells)
        return {
            "id": branch.id,
            "parent": None if branch.parent is None else branch.parent.id,
            "position": branch.position or 0,
            "label": branch.label if branch.parent is None else shown_label(branch),
            "state": "failed" if branch.error else "done" if branch.done else "running",
            "footer": line_below(branch, footer=self._footer, folded=self._folded),
            "error": branch.error,
            "in_text": num_in_text(branch) - (branch.position or 0) if branch.done else None,
            "start": start,
            "tokens": [_token(cell) for cell in cells],
        }


def line_below(branch: Branch, *, footer: bool, folded: bool) -> str:
    """Make the line under an answer or a branch; `folded`: the first answers have their line elsewhere."""
    if folded and branch.parent is None:
        return ""
    return branch_footer(branch.own, branch.error) if footer else branch.error


def kept_alternatives(nodes: Iterable[Branch]) -> int:
    """Return how many alternatives of each token a saved notebook keeps: the more tokens, the fewer."""
    count = sum(len(node.own_token_ids) for node in nodes)
    return max(1, min(EAGER_ALTERNATIVES, _KEPT_ALTERNATIVES // max(1, count)))


def shown_label(branch: Branch) -> str:
    """Return the token with which a branch begins, with every character visible."""
    entry = branch.own_logprobs[:1]
    known = entry[0].get(branch.token_id or 0) if entry else None
    return label_of(branch.token_id or 0, known.decoded_token if known else None)


def num_in_text(branch: Branch) -> int:
    """Count the tokens of an answer that are in its text: a stop string and a final token are not."""
    entries, text = branch.logprobs or [], branch.text
    parts = [_text(token_id, entry) for token_id, entry in zip(branch.token_ids, entries, strict=False)]
    whole = "".join(parts)
    # Some tokenizers drop a text's first space, so the text may begin one character later.
    dropped = 0 if whole.startswith(text) else 1
    if not whole[dropped:].startswith(text):
        return len(parts)
    end = dropped + len(text)
    position = 0
    for index, part in enumerate(parts):
        if position >= end:
            return index
        position += len(part)
    return len(parts)


def _text(token_id: int, entry: dict[int, Logprob]) -> str:
    known = entry.get(token_id)
    return (known.decoded_token if known else None) or ""


def _token(cell: TokenCell) -> list[Any]:
    return [
        cell.token_id,
        cell.pieces,
        shade(cell.probability),
        percent(cell.probability),
        cell.rank,
        [_alternative(alternative) for alternative in cell.alternatives],
    ]


def _alternative(alternative: Alternative) -> list[Any]:
    probability = alternative.probability
    return [alternative.token_id, alternative.label, percent(probability), float(f"{probability:.3g}")]
