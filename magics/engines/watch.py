"""`%engine watch` tells the notebook when a figure of an engine passes a bound; cells go on meanwhile."""

from __future__ import annotations

import argparse
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.magics.arguments import MagicParser
from nbengine.magics.engines.conditions import Change, Condition, ConditionWatch
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.metrics.history import FIGURES, MetricsHistory
from nbengine.widgets.live import LiveDisplay
from nbengine.widgets.words import table

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 1.0
"""Seconds between two looks at the engines that are watched."""
LOOK_BACK = 30.0
"""Seconds of the history that a look reads: more than passes between two."""
PATIENCE = 5.0
"""Seconds that a look waits for an engine's host; the next look asks again."""
_ALL = 0


@dataclass(eq=False)
class _Watch:
    """A line of `%engine watch`."""

    number: int
    engine: AttachedEngine
    rank: int | None
    notifies: bool
    state: ConditionWatch
    display: LiveDisplay
    """The output of the line, which says how things stand."""
    times: int = 0
    """The number of times that it has become true."""
    said: str = field(default="", init=False)
    """The text that says how things stand."""
    is_silent: bool = field(default=False, init=False)
    """The engine's host did not answer the last look."""

    @property
    def about(self) -> str:
        """Name engine, engine core and condition."""
        where = f"engine {self.engine.name!r}" + ("" if self.rank is None else f" rank {self.rank}")
        return f"{where}: {self.state.condition}"

    def show(self, text: str) -> None:
        """Say in the output of the line how things stand."""
        self.said = text
        self._display(text)

    def miss(self, error: NBEngineError) -> None:
        """Say that there is no news, until there is."""
        if not self.is_silent:
            self.is_silent = True
            self._display(f"no news: {error}")

    def hear(self) -> None:
        """Note that there is news again."""
        if self.is_silent:
            self.is_silent = False
            self._display(self.said)

    def _display(self, text: str) -> None:
        self.display.show({"text/plain": f"watch {self.number} of {self.about}: {text}"})


class Watches:
    """The watches of a notebook, and the thread that looks at the engines while there are any."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._lock = threading.Lock()
        self._watches: list[_Watch] = []
        self._numbers = itertools.count(1)
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def all(self) -> list[_Watch]:
        """Return the watches, the oldest first."""
        with self._lock:
            return list(self._watches)

    def add(self, engine: AttachedEngine, condition: Condition, rank: int | None, *, notifies: bool) -> None:
        """Begin to watch; what was before is not told."""
        state = ConditionWatch(condition)
        state.begin(engine.client.control.metrics(LOOK_BACK, rank=rank, timeout=PATIENCE))
        watch = _Watch(next(self._numbers), engine, rank, notifies, state, LiveDisplay(self._shell))
        watch.show("watched from now on; `%engine watch --stop` ends it")
        with self._lock:
            self._watches.append(watch)
            if self._thread is None:
                self._start()

    def stop(self, number: int = _ALL) -> list[_Watch]:
        """End one watch, or all, and return those that have ended."""
        with self._lock:
            ended = [watch for watch in self._watches if number in (_ALL, watch.number)]
            self._watches = [watch for watch in self._watches if watch not in ended]
            if not self._watches:
                self._wake.set()
        return ended

    def close(self) -> None:
        """End all watches and the thread."""
        thread = self._thread
        self.stop()
        if thread is not None:
            thread.join(PATIENCE + LOOK_INTERVAL)

    def look(self) -> None:
        """Look once at each engine, and tell what has changed; a watch ends with its engine."""
        for watch in self.all:
            try:
                found = watch.engine.client.control.metrics(LOOK_BACK, rank=watch.rank, timeout=PATIENCE)
            except EngineDeadError:
                if self.stop(watch.number):
                    watch.show(
                        f"over: the engine has ended, or the notebook has left it{_often(watch.times)}"
                    )
            except NBEngineError as error:
                # The host may stand, or a lease be renewed: the next look tells.
                self._tell(watch, partial(watch.miss, error))
            else:
                self._tell(watch, watch.hear)
                self._take(watch, found)

    def _tell(self, watch: _Watch, tell: Callable[[], object]) -> bool:
        """Say something of a watch unless it has ended: the one who ends it has the last word."""
        with self._lock:
            goes_on = watch in self._watches
            if goes_on:
                tell()
        return goes_on

    def _take(self, watch: _Watch, history: MetricsHistory) -> None:
        for change in watch.state.take(history):
            text = _sentence(watch, change)
            if not self._tell(watch, partial(watch.show, text)):
                return
            watch.times += change.is_true
            if change.is_true and watch.notifies:
                # A new output, below the cell that has run last.
                LiveDisplay(self._shell).show({"text/plain": f"{watch.about} is true: {text}"})

    def _run(self) -> None:
        while not self._wake.wait(LOOK_INTERVAL):
            try:
                self.look()
            except Exception:
                # A frontend or an engine that fails now must not end all watches for good.
                logger.exception("the watched engines could not be looked at")
        with self._lock:
            self._thread = None
            if self._watches:
                # One was added while this thread was ending.
                self._start()

    def _start(self) -> None:
        self._wake.clear()
        self._thread = threading.Thread(target=self._run, name="nbengine-watch", daemon=True)
        self._thread.start()


class WatchCommand:
    """The command `watch` of `%engine`."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session
        self._watches = Watches(shell)
        session.on_close.append(self._watches.close)

    def watch(self, words: Sequence[str]) -> None:
        """Begin, list or end watches."""
        parsed = _parser().parse_words(words)
        if parsed.stop is not None or parsed.list:
            if parsed.condition or (parsed.stop is not None and parsed.list):
                raise UsageError("%engine watch: give a condition, --list or --stop, one of them")
            self._stop(parsed.stop) if parsed.stop is not None else self._list()
            return
        if not parsed.condition:
            raise UsageError('%engine watch: which condition? `%engine watch "ttft_p95 > 0.5" --notify`')
        condition = Condition.parse(" ".join(parsed.condition))
        self._watches.add(self._session.get(parsed.engine), condition, parsed.rank, notifies=parsed.notify)

    def _list(self) -> None:
        rows = [
            [str(watch.number), watch.about, "yes" if watch.notifies else "no", str(watch.times), watch.said]
            for watch in self._watches.all
        ]
        print(
            table(rows, ["N", "CONDITION", "NOTIFIES", "TIMES TRUE", "STATE"])[0]
            if rows
            else "nothing is watched"
        )

    def _stop(self, number: int) -> None:
        ended = self._watches.stop(number)
        if not ended and number != _ALL:
            raise UsageError(f"%engine watch: there is no watch {number} (--list shows them)")
        for watch in ended:
            watch.show("ended")
        print(f"ended: {', '.join(watch.about for watch in ended)}" if ended else "nothing is watched")


def _parser() -> MagicParser:
    parser = MagicParser(
        "%engine watch",
        "Watch a figure of an engine, second by second, and say when it passes a bound. Cells go on meanwhile.",
        f"columns: {', '.join(FIGURES)}\noperators: > >= < <=",
    )
    parser.add_argument("condition", nargs="*", metavar="CONDITION", help='as in "ttft_p95 > 0.5"')
    parser.add_argument(
        "--notify",
        action="store_true",
        help="say it below the cell that has run last, too: once, and again only after it was false",
    )
    parser.add_argument("--engine", metavar="NAME", help="engine (default: the last one started or attached)")
    parser.add_argument("--rank", type=int, metavar="R", help="watch one engine core (default: any of them)")
    parser.add_argument("--list", action="store_true", help="show what is watched")
    parser.add_argument(
        "--stop", nargs="?", type=_watch_number, const=_ALL, metavar="N", help="end watch N, or all"
    )
    return parser


def _watch_number(text: str) -> int:
    if not (text.isdecimal() and len(text) < 10 and int(text) > _ALL):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a watch")
    return int(text)


def _sentence(watch: _Watch, change: Change) -> str:
    if change.row is None:
        return "no longer true: the engine core is gone"
    value = watch.state.condition.value(change.row)
    moment = time.strftime("%H:%M:%S", time.localtime(change.row.time))
    state = "true" if change.is_true else "no longer true"
    shown = "" if value is None else f", {watch.state.condition.column} was {value:.4g}"
    return f"{state} since {moment}{shown} (rank {change.row.rank})"


def _often(times: int) -> str:
    return f"; it was true {times} times" if times > 1 else "; it was true once" if times else ""
