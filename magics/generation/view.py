"""Where an answer appears while it streams: a cell's output, a terminal, or nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol
from weakref import WeakSet

from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.generation.open_views import ClosableView
from nbengine.magics.generation.render import answers_bundle, footer_of
from nbengine.magics.generation.result import GenerationResult
from nbengine.widgets.live import LiveDisplay, in_kernel
from nbengine.widgets.words import harmless, joined, print_quietly

UPDATE_SECONDS = 0.04
"""Between two updates of a cell: often enough to look like writing, seldom enough for the iopub channel."""
_CHARACTERS_PER_SECOND = 250_000
"""Jupyter's server drops output above a megabyte a second; each update sends the whole answer again."""
DUTY = 0.1
"""Share of the time that may go into drawing."""
_UPDATES_PER_SECOND = 250
"""Of all cells together: the server drops output above a thousand messages a second."""


def pause_after(size: int, cost: float, num_views: int = 1) -> float:
    """Seconds to wait after an update of so many characters that took `cost` seconds, where so many views update."""
    share = max(1 / _UPDATES_PER_SECOND, size / _CHARACTERS_PER_SECOND, cost / DUTY)
    return max(UPDATE_SECONDS, num_views * share)


@dataclass(frozen=True)
class Appearance:
    """How an answer is to be shown."""

    format: str = "text"
    """"text", "markdown", "code" or "json"."""
    stream: bool = True
    """Whether it is shown while it grows."""
    footer: bool = True
    placeholder: str = ""
    """What stands in its place before it begins."""


class View(Protocol):
    """Shows a growing result. `interval` is how many seconds the next update should wait."""

    interval: float

    def update(self, result: GenerationResult) -> None:
        """Show what there is."""

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Show the final state, once; `note` is what else there is to say."""


class CellView:
    """The answer as one output of the cell, replaced in place. Those that stream share the kernel's and the server's time."""

    _streaming: ClassVar[WeakSet[CellView]] = WeakSet()

    def __init__(self, shell: InteractiveShell, appearance: Appearance) -> None:
        self.interval = UPDATE_SECONDS
        self._live = LiveDisplay(shell)
        self._appearance = appearance
        if appearance.placeholder:
            self._live.show(answers_bundle([], appearance.format, appearance.placeholder, complete=False))

    def update(self, result: GenerationResult) -> None:
        """Replace the answer and set the pace by what that cost."""
        if not self._appearance.stream or result.finished:
            return
        started = time.perf_counter()
        size = self._live.show(answers_bundle(result.outputs, self._appearance.format, complete=False))
        cost = time.perf_counter() - started
        self._streaming.add(self)
        self.interval = pause_after(size, cost, len(self._streaming))

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Replace the answer by its final form, with the footer; an empty answer leaves no output."""
        self._streaming.discard(self)
        footer = joined(footer_of(result) if self._appearance.footer else "", note)
        if any(answer.text for answer in result.outputs) or footer or self._live.shown:
            self._live.show(answers_bundle(result.outputs, self._appearance.format, footer))


class TerminalView:
    """The answer printed as it comes; what has been printed stays. Further completions are printed at the end."""

    interval = UPDATE_SECONDS

    def __init__(self, appearance: Appearance) -> None:
        self._appearance = appearance
        self._printed = 0

    def update(self, result: GenerationResult) -> None:
        """Print what is new."""
        if self._appearance.stream and len(result.text) > self._printed:
            print(harmless(result.text[self._printed :]), end="", flush=True)
            self._printed = len(result.text)

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Print the rest and the footer."""
        print(harmless(result.text[self._printed :]))
        for completion in result.outputs[1:]:
            print(f"\n{completion.index + 1}.\n{harmless(completion.text)}")
        footer = joined(footer_of(result) if self._appearance.footer else "", note)
        if footer:
            print_quietly(footer)


class SilentView:
    """Nothing is shown: the answer is asked for later."""

    interval = UPDATE_SECONDS

    def update(self, result: GenerationResult) -> None:
        """Show nothing."""

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Show nothing."""


def view_for(
    shell: InteractiveShell,
    appearance: Appearance,
    *,
    background: bool = False,
    own: View | None = None,
    on_tokens: Callable[[ClosableView], object] | None = None,
) -> View:
    """The view of the running cell, with `own` for the answer if a magic has a view of its own; with `on_tokens` it
    is that of single tokens, too, and is given to it. In a terminal a background answer would run into what is being
    typed."""
    if not in_kernel(shell):
        return own or (SilentView() if background else TerminalView(appearance))
    if background:
        appearance = replace(appearance, placeholder="in the background …")
    if on_tokens is None:
        return own or CellView(shell, appearance)
    from nbengine.magics.tokens.view import TokensView

    if own is None and appearance.format != "text":
        own = CellView(shell, appearance)
    view = TokensView(shell, appearance, own)
    on_tokens(view)
    return view
