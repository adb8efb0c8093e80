"""`%engine scale` and `waves`: several engine cores behind one name."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from IPython.core.interactiveshell import InteractiveShell

from nbengine.client.engines.directory import find_engine
from nbengine.errors import InvalidArgumentError
from nbengine.magics.arguments import MagicParser
from nbengine.magics.engines.reports import capacity
from nbengine.magics.interrupts import Interrupted
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.runtime.connection import newest
from nbengine.widgets.live import LiveDisplay, in_kernel, publish_bundle
from nbengine.widgets.processes.progress import StartProgress
from nbengine.widgets.waves.recording import WaveRecording
from nbengine.widgets.words import count, seconds

DEFAULT_SECONDS = 5.0
REFRESH_SECONDS = 0.25


class ParallelCommands:
    """The commands of `%engine` about its engine cores."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session
        self.commands: dict[str, Callable[[Sequence[str]], None]] = {
            "scale": self._scale,
            "waves": self._waves,
        }

    def _scale(self, words: Sequence[str]) -> None:
        parser = MagicParser(
            "%engine scale",
            "Start or end engine cores until there are N, while requests run. New ones take requests as soon as they "
            "are ready; those that go, the last ones, finish what they have begun, and the rest goes to others.",
        )
        parser.add_argument("name", nargs="?", help="engine (default: the last one started or attached)")
        parser.add_argument(
            "--dp",
            "--data-parallel-size",
            type=int,
            required=True,
            metavar="N",
            dest="size",
            help="number of engine cores",
        )
        parsed = parser.parse_words(words)
        engine = self._session.get(parsed.name)
        if parsed.size < 1:
            raise InvalidArgumentError("data_parallel_size", parsed.size, "at least 1")
        before = len(newest(engine.client.connection).ready) or len(engine.client.engine_ranks)
        if parsed.size == before:
            print(f"engine {engine.name!r} has {count(before, 'engine core')} already")
            return
        self._change(engine, before, parsed.size)

    def _change(self, engine: AttachedEngine, before: int, size: int) -> None:
        began = time.monotonic()
        title = f"scaling {engine.name} from {before} to {count(size, 'engine core')}"
        parallel = engine.client.config.parallel
        with StartProgress(self._shell, title, parallel, range(before, size)) as progress:
            try:
                size = engine.client.scale_blocking(size, progress=progress.update)
            except KeyboardInterrupt:
                raise Interrupted("not waited for; the engine goes on with it") from None
            engine.arguments["data_parallel_size"] = size
            took = seconds(time.monotonic() - began)
            progress.conclusion = f"engine {engine.name!r} was scaled in {took}: {capacity(engine)}"

    def _waves(self, words: Sequence[str]) -> None:
        parser = MagicParser(
            "%engine waves",
            "Record what each engine core does: its steps and, in lock step, its dummy steps, its pauses "
            "and the waves. An interrupt ends the recording.",
        )
        parser.add_argument("name", nargs="?", help="engine, also one that this notebook is not attached to")
        parser.add_argument(
            "--seconds",
            type=_span,
            default=DEFAULT_SECONDS,
            metavar="S",
            help=f"duration in seconds (default:  {DEFAULT_SECONDS:g})",
        )
        parsed = parser.parse_words(words)
        engine = self._session.find(parsed.name) if parsed.name else self._session.get()
        info = find_engine(parsed.name or "") if engine is None else engine.client.connection
        live = LiveDisplay(self._shell) if in_kernel(self._shell) else None
        with WaveRecording(info) as recording:
            self._watch(recording, time.monotonic() + parsed.seconds, live)
        if live is not None:
            live.show(recording.timeline.bundle())
        else:
            publish_bundle(self._shell, recording.timeline.bundle())

    def _watch(self, recording: WaveRecording, end: float, live: LiveDisplay | None) -> None:
        """Show the recording while it goes on."""
        try:
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, REFRESH_SECONDS))
                if live is not None:
                    live.show(recording.timeline.bundle())
        except KeyboardInterrupt:
            # The interrupt ends the recording, and what was recorded until then is shown.
            return


def _span(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 3600")
    return value
