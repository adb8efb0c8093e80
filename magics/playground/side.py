"""One side of the playground: its request that runs, and the messages that tell of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from nbengine.magics.generation.render import footer_of, prompt_line
from nbengine.magics.generation.result import GenerationHandle, GenerationResult
from nbengine.magics.generation.view import UPDATE_SECONDS

Frame = dict[str, Any]


class Side:
    """A side's answers, which are sent as they grow; safe on any thread. It is the view of its own stream."""

    def __init__(self, number: int, send: Callable[[Frame], None], on_end: Callable[[], None]) -> None:
        self.interval = UPDATE_SECONDS
        self.handle: GenerationHandle | None = None
        self._number = number
        self._send = send
        self._on_end = on_end
        self._lock = threading.RLock()
        self._texts: list[str] = []
        self._sent: list[int] = []
        self._running = False
        self._footer = self._error = ""

    key = ""

    @property
    def is_running(self) -> bool:
        """Return whether an answer is being written."""
        return self._running

    def begin(self) -> None:
        """Note that a request is sent, whose answer takes the place of the one before."""
        with self._lock:
            self._texts, self._sent = [], []
            self._running, self._footer, self._error = True, "waiting", ""
            self._push()

    def fail(self, error: str) -> None:
        """Show why there is no answer."""
        with self._lock:
            self._running, self._footer, self._error = False, "", error
            self._push()
        self._on_end()

    def update(self, result: GenerationResult) -> None:
        """Send what is new."""
        with self._lock:
            self._take(result)
            self._footer = prompt_line(result) or footer_of(result)
            self._push()

    def show_waiting(self, line: str) -> bool:
        """Send why the answer has not begun."""
        with self._lock:
            self._footer = line or "waiting"
            self._push()
        return True

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Send the final state; `note` is the error that ended the answer."""
        with self._lock:
            self._take(result)
            self._running, self._footer, self._error = False, footer_of(result), note
            self._push()
        self._on_end()

    def stop(self) -> None:
        """End the answer that is being written; what there is stays."""
        if self.handle is not None:
            self.handle.cancel()

    def whole(self) -> Frame:
        """Return the message that tells all of it, after which only news are sent."""
        with self._lock:
            self._sent = [len(text) for text in self._texts]
            return self._frame([0] * len(self._texts), self._texts)

    def _take(self, result: GenerationResult) -> None:
        self._texts = [completion.text for completion in result.outputs]

    def _push(self) -> None:
        starts = [*self._sent, *[0] * (len(self._texts) - len(self._sent))]
        news = [text[start:] for text, start in zip(self._texts, starts, strict=False)]
        self._sent = [len(text) for text in self._texts]
        self._send({"kind": "side", **self._frame(starts[: len(news)], news)})

    def _frame(self, starts: list[int], texts: list[str]) -> Frame:
        return {
            "side": self._number,
            "running": self._running,
            "start": starts,
            "texts": texts,
            "footer": self._footer,
            "error": self._error,
        }
