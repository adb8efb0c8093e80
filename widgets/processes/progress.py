"""The stages of an engine's start, with their seconds, while it starts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from html import escape
from types import TracebackType
from typing import Self

from IPython.core.interactiveshell import InteractiveShell

from nbengine.config import ParallelConfig
from nbengine.ipc.control_messages import Progress
from nbengine.widgets.live import LiveDisplay, in_kernel
from nbengine.widgets.processes.stages import StartStages
from nbengine.widgets.words import QUIET

_REFRESH_SECONDS = 0.2


class StartProgress:
    """A context manager that shows the stages of a start.

    In a notebook they are one output that is replaced in place, with a line for each engine core and each
    worker where there are several; in a terminal a line is printed for each stage, and each part of one, that
    is over. Leaving it with an exception marks what runs as failed. `conclusion` is the last line; `ranks`
    are the engine cores that start, all of them unless given.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        title: str,
        parallel: ParallelConfig,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.conclusion = ""
        self._title = title
        self._live = LiveDisplay(shell) if in_kernel(shell) else None
        self._stages = StartStages(parallel, ranks)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, name="nbengine-start-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._live is None:
            print(self._title, flush=True)
        else:
            self._draw()
            self._refresher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        if self._refresher.is_alive():
            self._refresher.join()
        with self._lock:
            self._print(self._stages.end("done" if kind is None else "failed"))
            if kind is not None and not self._stages.lines():
                # It was refused before anything began, and no stage says so.
                self._title += ": not started"
        if self._live is not None:
            self._draw()
        elif self.conclusion:
            print(self.conclusion, flush=True)

    def update(self, progress: Progress) -> None:
        """Take in a report from the engine; callable from any thread."""
        with self._lock:
            self._print(self._stages.take(progress))

    def _print(self, lines: list[str]) -> None:
        if self._live is None and lines:
            print("\n".join(lines), flush=True)

    def _refresh(self) -> None:
        while not self._closing.wait(_REFRESH_SECONDS):
            with self._lock:
                self._stages.tick()
            self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        with self._lock:
            lines = [self._title, *self._stages.lines(), self.conclusion]
            text = "\n".join(line for line in lines if line)
        self._live.show(
            {
                "text/plain": text,
                "text/html": f'<pre style="{QUIET};margin:0">{escape(text)}</pre>',
            }
        )
