"""The views of an answer while it streams: a cell's output, a terminal, or none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar
from uuid import uuid4
from weakref import WeakSet

from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.generation.render import (
    answers_bundle,
    footer_of,
    prompt_line,
    stream_line,
    streaming_bundle,
)
from nbengine.magics.generation.result import GenerationResult
from nbengine.widgets.live import LiveDisplay, in_kernel
from nbengine.widgets.open_views import ClosableView
from nbengine.widgets.words import harmless, joined, print_quietly

UPDATE_SECONDS = 0.04
"""Seconds between two updates of a cell: few enough to look like writing, enough for the iopub channel."""
_CHARACTERS_PER_SECOND = 250_000
"""Jupyter's server drops output above a megabyte a second; each update sends the whole answer again."""
ERASE_LINE = "\r\x1b[2K"
DUTY = 0.1
"""The share of the time that may go into drawing."""
_UPDATES_PER_SECOND = 200
"""The most updates of all cells together: the server drops output above a thousand messages a second."""


def pause_after(size: int, cost: float, num_views: int = 1) -> float:
    """Return the seconds to wait after an update.

    The update sent `size` characters and took its thread `cost` seconds of a processor's time, and it is one of
    `num_views` views that update. A pause of the machine is no cost.
    """
    share = max(1 / _UPDATES_PER_SECOND, size / _CHARACTERS_PER_SECOND, cost / DUTY)
    return max(UPDATE_SECONDS, num_views * share)


Shown_contra = TypeVar("Shown_contra", contravariant=True)


@dataclass(frozen=True)
class Appearance:
    """The form in which an answer is shown."""

    format: str = "text"
    """"text", "markdown", "code" or "json"."""
    stream: bool = True
    """The answer is shown while it grows."""
    footer: bool = True
    placeholder: str = ""
    """The text that stands in the answer's place before it begins."""


class View(Protocol[Shown_contra]):
    """A view that shows a growing result, of one request or of several; `interval` is the number of seconds until the next update."""

    interval: float
    key: str
    """The key that marks the output while it grows, for its stop button; empty if the view has no output that can have one."""

    def update(self, result: Shown_contra) -> None:
        """Show the present state."""

    def finish(self, result: Shown_contra, note: str = "") -> None:
        """Show the final state, once; `note` is a last line to add."""

    def show_waiting(self, line: str) -> bool:
        """Show in the place of the answer why it has not begun, no more so if `line` is empty; return whether it can."""


class CellView:
    """A view that shows the answer as one output of the cell and replaces it in place.

    Views that stream at the same time share the kernel's and the server's time.
    """

    _streaming: ClassVar[WeakSet[CellView]] = WeakSet()

    def __init__(self, shell: InteractiveShell, appearance: Appearance) -> None:
        self.interval = UPDATE_SECONDS
        self.key = uuid4().hex
        self._live = LiveDisplay(shell)
        self._appearance = appearance
        if appearance.placeholder:
            self.show_waiting("")

    def show_waiting(self, line: str) -> bool:
        """Show the line, or the placeholder, where the answer is going to stand."""
        line = line or self._appearance.placeholder
        self._live.show(streaming_bundle([], self._appearance.format, line, self.key))
        return True

    def update(self, result: GenerationResult) -> None:
        """Replace the answer, or what is said of a long prompt, and set the pace by what that cost."""
        line = prompt_line(result)
        if result.finished or not (self._appearance.stream or line):
            return
        if not line and self._appearance.footer:
            line = stream_line(result)
        started = time.thread_time()
        size = self._live.show(self._bundle(result, line, complete=False))
        cost = time.thread_time() - started
        self._streaming.add(self)
        self.interval = pause_after(size, cost, len(self._streaming))

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Replace the answer by its final form, with the footer; an empty answer leaves no output."""
        self._streaming.discard(self)
        footer = joined(footer_of(result) if self._appearance.footer else "", note)
        if any(answer.text for answer in result.outputs) or footer or self._live.shown:
            self._live.show(self._bundle(result, footer))

    def _bundle(self, result: GenerationResult, footer: str = "", *, complete: bool = True) -> dict[str, str]:
        outputs = result.outputs
        if self._appearance.format == "json":
            outputs = [result.without_reasoning(answer) for answer in outputs]
        if complete:
            return answers_bundle(outputs, self._appearance.format, footer)
        return streaming_bundle(outputs, self._appearance.format, footer, self.key)


class PromptLine:
    """The line of a terminal that says how much of a long prompt has been read, until something else is printed."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, result: GenerationResult) -> bool:
        """Show it if there is something to say, and return whether there is."""
        line = prompt_line(result)
        if line and sys.stdout.isatty():
            self._is_shown = True
            print(f"{ERASE_LINE}\x1b[2m[{line}]\x1b[0m", end="", flush=True)
        return bool(line)

    def erase(self) -> None:
        """Make room for what is printed next."""
        if self._is_shown:
            self._is_shown = False
            print(ERASE_LINE, end="", flush=True)


class TerminalView:
    """A view that prints the answer as it comes, and further completions at the end; printed text stays."""

    interval = UPDATE_SECONDS
    key = ""

    def __init__(self, appearance: Appearance) -> None:
        self._appearance = appearance
        self._printed = 0
        self._line = PromptLine()

    def update(self, result: GenerationResult) -> None:
        """Print the part that has been added."""
        if self._line.show(result):
            return
        self._line.erase()
        if self._appearance.stream and len(result.text) > self._printed:
            print(harmless(result.text[self._printed :]), end="", flush=True)
            self._printed = len(result.text)

    def show_waiting(self, line: str) -> bool:
        """Return that nothing printed can be replaced."""
        del line
        return False

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Print the remaining text and the footer."""
        self._line.erase()
        print(harmless(result.text[self._printed :]))
        for completion in result.outputs[1:]:
            print(f"\n{completion.index + 1}.\n{harmless(completion.text)}")
        footer = joined(footer_of(result) if self._appearance.footer else "", note)
        if footer:
            print_quietly(footer)


class SilentView:
    """A view that shows nothing, since the answer is read later."""

    interval = UPDATE_SECONDS
    key = ""

    def update(self, result: object) -> None:
        """Show nothing."""

    def finish(self, result: object, note: str = "") -> None:
        """Show nothing."""

    def show_waiting(self, line: str) -> bool:
        """Return that nothing is shown."""
        del line
        return False


def view_for(
    shell: InteractiveShell,
    appearance: Appearance,
    *,
    background: bool = False,
    own: View[GenerationResult] | None = None,
    on_tokens: Callable[[ClosableView], object] | None = None,
) -> View[GenerationResult]:
    """Make the view of the running cell; `own` shows the answer if a magic has a custom view.

    With `on_tokens` the view shows single tokens, too, and `on_tokens` receives it. In a terminal a
    background answer would run into what the user types, so its view is silent.
    """
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
