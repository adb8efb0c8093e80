"""Stages of an engine's start, with their seconds, while it starts."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from html import escape
from types import TracebackType
from typing import Self

from IPython.core.interactiveshell import InteractiveShell

from nbengine.ipc.messages import Progress
from nbengine.widgets.live import LiveDisplay, in_kernel

_REFRESH_SECONDS = 0.2
_MARKS = {"done": "✓", "running": "▸", "failed": "✗"}


@dataclass
class StageState:
    """One stage as it is shown: `state` is "running", "done" or "failed"."""

    name: str
    started: float
    detail: str = ""
    fraction: float | None = None
    seconds: float = 0.0
    state: str = "running"

    def line(self) -> str:
        """The stage as one line of text."""
        share = f"{self.fraction:4.0%}  " if self.fraction is not None and self.state == "running" else ""
        return f"  {_MARKS[self.state]} {self.name:<8} {self.seconds:6.1f} s  {share}{self.detail}".rstrip()


class StartProgress:
    """Shows the stages of a start: in a notebook one output that is replaced in place, in a terminal a line for
    each stage that is over. A context manager: leaving it with an exception marks the running stage as failed.
    `conclusion` is the last line.
    """

    def __init__(self, shell: InteractiveShell, title: str) -> None:
        self.conclusion = ""
        self._title = title
        self._live = LiveDisplay(shell) if in_kernel(shell) else None
        self._stages: list[StageState] = []
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
            self._end_stage("done" if kind is None else "failed")
        if self._live is not None:
            self._draw()
        elif self.conclusion:
            print(self.conclusion, flush=True)

    def update(self, progress: Progress) -> None:
        """Take a report from the engine; callable from any thread."""
        with self._lock:
            current = self._stages[-1] if self._stages else None
            if current is None or current.name != progress.stage:
                self._end_stage("done")
                current = StageState(progress.stage, time.monotonic() - progress.seconds)
                self._stages.append(current)
            current.fraction = progress.fraction
            current.detail = progress.detail or current.detail
            current.seconds = max(current.seconds, progress.seconds)

    @property
    def stages(self) -> list[StageState]:
        """The stages so far, in order."""
        return list(self._stages)

    def _end_stage(self, state: str) -> None:
        if not self._stages or self._stages[-1].state != "running":
            return
        stage = self._stages[-1]
        stage.seconds = max(stage.seconds, time.monotonic() - stage.started)
        stage.state = state
        if self._live is None:
            print(stage.line(), flush=True)

    def _refresh(self) -> None:
        while not self._closing.wait(_REFRESH_SECONDS):
            with self._lock:
                if self._stages and self._stages[-1].state == "running":
                    stage = self._stages[-1]
                    stage.seconds = time.monotonic() - stage.started
            self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        with self._lock:
            lines = [self._title, *(stage.line() for stage in self._stages), self.conclusion]
            text = "\n".join(line for line in lines if line)
        self._live.show(
            {
                "text/plain": text,
                "text/html": f'<pre style="color:var(--jp-ui-font-color2,#666);margin:0">{escape(text)}</pre>',
            }
        )
