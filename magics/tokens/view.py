"""Answers with `--logprobs`: shaded tokens in a widget that can branch, and static HTML without it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.generation.render import answers_bundle, prompt_line, streaming_bundle
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.view import DUTY, UPDATE_SECONDS, Appearance, View
from nbengine.magics.tokens.branch import Branch
from nbengine.magics.tokens.branching import BranchTree
from nbengine.magics.tokens.feed import TokensFeed, kept_alternatives, line_below, num_in_text, shown_label
from nbengine.widgets.idle import IdleClock
from nbengine.widgets.live import LiveDisplay
from nbengine.widgets.tokens.cells import token_cells
from nbengine.widgets.tokens.html import tokens_html
from nbengine.widgets.words import COLOURED, PLAIN, PROSE, muted

if TYPE_CHECKING:
    from nbengine.widgets.tokens.widget import TokensWidget

logger = logging.getLogger(__name__)

GREETING_SECONDS = 10.0
"""Seconds for which the kernel must be idle before a script that has not said hello is given up."""
_PROSE = f"{PROSE};line-height:1.6"


class TokensView:
    """A view that shows the tokens as one output of the cell and outlives it: branches go on in it.

    Where another view, `rendered`, shows the answer itself, the tokens are in an output below it, folded.
    """

    def __init__(
        self, shell: InteractiveShell, appearance: Appearance, rendered: View[GenerationResult] | None = None
    ) -> None:
        self.interval = UPDATE_SECONDS
        # The tokens have a button of their own; before the first one there is an output without tokens.
        self.key = uuid4().hex if rendered is None else rendered.key
        self._live = LiveDisplay(shell)
        self._idle = IdleClock.of(shell)
        self._appearance = appearance
        self._rendered = rendered
        if rendered is None and appearance.placeholder:
            self.show_waiting("")
        self._widget: TokensWidget | None = None
        self._feed: TokensFeed | None = None
        self._tree: BranchTree | None = None
        self._greeted = threading.Event()
        self._given_up = False
        self._stale = False
        """A saved notebook would lack something."""
        self._is_closed = False
        self._lock = threading.RLock()
        """The lock that keeps an older state from being shown after a newer one."""

    def show_waiting(self, line: str) -> bool:
        """Show the line, or the placeholder, where the answer is going to stand."""
        if self._rendered is not None:
            return self._rendered.show_waiting(line)
        self._live.show(streaming_bundle([], "text", line or self._appearance.placeholder, self.key))
        return True

    def update(self, result: GenerationResult) -> None:
        """Send what is new, and set the pace by what that cost."""
        if self._rendered is not None:
            self._rendered.update(result)
            self.interval = self._rendered.interval
            return
        if (reading := prompt_line(result)) and not result.finished:
            self._live.show(streaming_bundle([], "text", reading, self.key))
            return
        if not self._appearance.stream or result.finished:
            return
        started = time.thread_time()
        self._show(result)
        self.interval = max(UPDATE_SECONDS, (time.thread_time() - started) / DUTY)

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Show the final state, and the branches from now on."""
        if self._rendered is not None:
            self._rendered.finish(result, note)
        if not any(root.token_ids for root in result.tree.roots) and self._tree is None:
            self._finish_without_tokens(result, note)
            return
        for root in result.tree.roots:
            root.error = note
        self._show(result)
        self._refresh()
        result.tree.listeners.append(self._on_branch)
        if self._widget is not None:
            self._wait_for_greeting()

    def close(self) -> None:
        """Replace the widget by the static form: the engine is left, and nothing can branch any more."""
        with self._lock:
            self._is_closed = True
            if self._widget is None or self._feed is None:
                return
            widget, self._widget = self._widget, None
            self._feed.close()
            self._feed = None
            self._refresh()
            widget.close()

    def _finish_without_tokens(self, result: GenerationResult, note: str) -> None:
        if self._rendered is None and (note or self._live.shown):
            self._live.show(answers_bundle(result.outputs, "text", note))

    def _show(self, result: GenerationResult) -> None:
        with self._lock:
            if self._tree is None:
                self._tree = result.tree
                self._open()
                self._refresh()
            if self._feed is not None:
                for root in self._tree.roots:
                    self._feed.push(root)
            elif not result.finished:
                self._refresh()

    def _open(self) -> None:
        assert self._tree is not None
        if self._is_closed:
            return
        try:
            from nbengine.widgets.tokens.widget import TokensWidget
        except ImportError as error:
            logger.info("tokens are shown without a widget: %s", error)
            return
        self._widget = TokensWidget(self._receive, folded=self._rendered is not None)
        self._feed = TokensFeed(
            self._tree,
            self._widget,
            footer=self._appearance.footer,
            folded=self._rendered is not None,
            on_hello=self._on_hello,
            on_rest=self._on_rest,
        )

    def _receive(self, content: object) -> None:
        feed = self._feed
        if feed is not None:
            feed.receive(content)

    def _on_hello(self) -> None:
        self._greeted.set()
        if self._given_up:
            self._given_up = False
            self._refresh()

    def _wait_for_greeting(self) -> None:
        if not self._greeted.is_set():
            waiting = threading.Timer(GREETING_SECONDS, self._look_for_greeting)
            waiting.daemon = True
            waiting.start()

    def _look_for_greeting(self) -> None:
        if self._is_closed:
            return
        if self._idle.idle_seconds < GREETING_SECONDS:
            # The script's message may wait behind the cell that runs.
            self._wait_for_greeting()
        elif not self._greeted.is_set():
            self._given_up = True
            self._refresh()

    def _on_branch(self, branch: Branch) -> None:
        feed = self._feed
        if feed is not None:
            feed.push(branch)
        if branch.done:
            self._stale = True
            if self._is_closed or not self._greeted.is_set():
                self._on_rest()

    def _on_rest(self) -> None:
        if self._stale:
            self._stale = False
            self._refresh()

    def _refresh(self) -> None:
        """Replace the output that a saved notebook keeps."""
        with self._lock:
            if self._tree is None:
                return
            bundle: dict[str, Any] = dict(
                static_bundle(self._tree, footer=self._appearance.footer, folded=self._rendered is not None)
            )
            if self._widget is not None and not self._given_up:
                bundle.update(self._widget.mime_bundle())
            self._live.show(bundle)


def static_bundle(tree: BranchTree, *, footer: bool, folded: bool = False) -> dict[str, str]:
    """Render all answers and branches as HTML and plain text; `folded`: the answers are shown above."""
    count = sum(len(node.own_token_ids) for node in tree)
    most = kept_alternatives(tree)
    several = len(tree) > 1
    html, plain = [], []
    for node in tree:
        heading = _heading(node) if several else ""
        line = line_below(node, footer=footer, folded=folded)
        html.append(muted(heading) + shaded(node, most) + muted(line))
        if not folded or node.parent is not None:
            plain.append("\n".join(filter(None, [heading, node.text + (f"\n\n[{line}]" if line else "")])))
    body = "".join(html)
    if folded:
        body = f"<details><summary>Tokens and their probabilities</summary>{body}</details>"
        plain.insert(0, f"[{count} tokens with their probabilities]")
    return {"text/plain": "\n\n".join(plain), "text/html": body}


def shaded(node: Branch, most: int) -> str:
    """Render the own part of an answer or a branch as HTML, with at most `most` alternatives a token."""
    cells = token_cells(node.own_token_ids, node.own_logprobs, most)
    in_text = num_in_text(node) - (node.position or 0) if node.done else None
    return f'<div {PLAIN} style="{_PROSE};{COLOURED}">{tokens_html(cells, in_text)}</div>'


def _heading(node: Branch) -> str:
    if node.parent is None:
        return f"{node.id + 1}."
    return f"{node.id + 1}. ↳ {shown_label(node)} at {node.position} of {node.parent.id + 1}."
