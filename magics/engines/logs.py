"""`%engine logs` shows the end of a log, and what is added to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.client.engines.logs import find_log, find_worker_log, follow_log
from nbengine.errors import NBEngineError
from nbengine.magics.arguments import MagicParser
from nbengine.magics.session import NotebookSession
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.logs import log_end, log_size
from nbengine.widgets.live import LiveDisplay, in_kernel

DEFAULT_LINES = 40
SHOWN_LINES = 200
"""The most lines that a cell shows of a log that is followed: the last ones."""
SHOWN_CHARACTERS = 500
"""The most characters that a cell shows of each line."""


class LogCommands:
    """The command `logs` of `%engine`."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session

    def logs(self, words: Sequence[str]) -> None:
        """Show the end of a log, and with `--follow` what is added until an interrupt or the engine's end."""
        parser = MagicParser("%engine logs", "Show the last lines of an engine's log, also after its end.")
        parser.add_argument("name", nargs="?", help="engine (default: the last one started or attached)")
        parser.add_argument("-n", type=int, default=DEFAULT_LINES, metavar="N", help="number of lines")
        parser.add_argument(
            "-f", "--follow", action="store_true", help="go on with what is added, until an interrupt"
        )
        parser.add_argument(
            "--rank",
            "--worker",
            type=int,
            metavar="R",
            help="show the log of the worker of this rank instead, counted through all engine cores",
        )
        parsed = parser.parse_words(words)
        path, info = self._find(parsed.name)
        if parsed.rank is not None:
            path = find_worker_log(path, parsed.rank)
        if parsed.follow:
            self._follow(path, info, max(1, parsed.n))
        else:
            print(log_end(path, max(1, parsed.n)) or "the log is empty")

    def _find(self, name: str | None) -> tuple[Path, ConnectionInfo | None]:
        if name is None:
            info = self._session.get().client.connection
            return Path(info.log_path), info
        try:
            return find_log(name)
        except NBEngineError as error:
            raise UsageError(f"%engine logs: {error}") from None

    def _follow(self, path: Path, info: ConnectionInfo | None, num_lines: int) -> None:
        size = log_size(path)
        added = follow_log(path, info, size)
        tail = log_end(path, num_lines, size)
        try:
            if in_kernel(self._shell):
                self._follow_in_cell(tail, added)
            else:
                print(tail, flush=True)
                for text in added:
                    print(text, end="", flush=True)
            print("the engine has ended")
        except KeyboardInterrupt:
            print("not followed any more")

    def _follow_in_cell(self, tail: str, added: Iterator[str]) -> None:
        live, lines = LiveDisplay(self._shell), RollingLines()
        lines.add(f"{tail}\n")
        live.show(lines.bundle())
        for text in added:
            lines.add(text)
            live.show(lines.bundle())


class RollingLines:
    """The last lines of a text that grows, each no longer than a cell can show."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._unfinished = ""

    def add(self, text: str) -> None:
        """Take in text that was added; its last line may not be complete."""
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        # A line may grow without an end, so no more of it is kept than is shown.
        if len(self._unfinished) > SHOWN_CHARACTERS:
            self._unfinished = _shown(self._unfinished)
        self._lines.extend(map(_shown, lines))

    def bundle(self) -> dict[str, str]:
        """Show the last lines, as a MIME bundle."""
        lines = [*self._lines, *([_shown(self._unfinished)] if self._unfinished else [])]
        text = "\n".join(lines[-SHOWN_LINES:])
        style = "white-space:pre-wrap;overflow-wrap:anywhere;max-height:30em;overflow-y:auto;margin:0"
        return {"text/plain": text, "text/html": f'<pre style="{style}">{escape(text)}</pre>'}


def _shown(line: str) -> str:
    """Cut a line to what a terminal would leave of it, at most `SHOWN_CHARACTERS` characters."""
    line = line.rstrip("\r").rpartition("\r")[2]
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 1]}…"
