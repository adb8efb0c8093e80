"""The writer of runs: a thread that is there while something waits to be written, so that nothing else waits."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

from nbengine.errors import NBEngineError
from nbengine.frontend.runs.run import FoundScores, KeptRun, Limits, Run
from nbengine.frontend.runs.store import RunStore

MOST_WAITING = 10_000
"""The most runs that wait in memory, while the disk takes none."""
_MOST_AT_ONCE = 500
_EXIT_SECONDS = 5.0
"""The most seconds that the interpreter's exit waits for."""
_FLUSH_SECONDS = 60.0

_writers: weakref.WeakSet[RunWriter] = weakref.WeakSet()


class RunWriter:
    """A writer of runs into a store; safe on any thread, and silent in a forked child."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: list[tuple[Run, KeptRun]] = []
        self._scored: dict[KeptRun, FoundScores] = {}
        """The scores that wait, of runs that were given before."""
        self._limits = Limits()
        self._is_writing = False
        self._num_lost = 0
        self._trouble = ""
        self._has_told = False
        _writers.add(self)

    def keep(self, run: Run, limits: Limits) -> KeptRun:
        """Have a run written soon, without waiting for the disk, and return what will have its number.

        `limits` hold for the store from now on.
        """
        kept = KeptRun()
        # The child of a fork repeats what the notebook does: its runs are not the user's.
        if os.getpid() != self._pid:
            return kept
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                self._note_loss(1, "the disk takes too long")
                return kept
            self._waiting.append((run, kept))
            self._limits = limits
            has_thread, self._is_writing = self._is_writing, True
        if not has_thread:
            self._start()
        return kept

    def score(self, kept: KeptRun, found: FoundScores) -> None:
        """Have the scores of a run written soon, in the place of those that it has; nothing where it is not kept."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._scored[kept] = found
            has_thread, self._is_writing = self._is_writing, True
        if not has_thread:
            self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._write_all, name="nbengine-runs", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread can start while the interpreter ends.
            self._write_all()

    def flush(self, timeout: float = _FLUSH_SECONDS) -> bool:
        """Wait until nothing waits to be written, at most `timeout` seconds, and return whether that is so."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_writing, timeout)

    def take_trouble(self) -> str:
        """Say what keeps runs from being written, once until they can be written again; else return an empty text."""
        if os.getpid() != self._pid:
            return ""
        with self._changed:
            if not self._trouble or self._has_told:
                return ""
            self._has_told = True
            lost = {0: "scores of runs are", 1: "a run is"}.get(
                self._num_lost, f"{self._num_lost:,} runs are"
            )
            return f"{lost} not kept: {self._trouble}"

    def _write_all(self) -> None:
        try:
            while self._write_some():
                pass
        except BaseException:
            with self._changed:
                self._end()
            raise

    def _write_some(self) -> bool:
        """Write what waits; return False, and count as not writing, if that is nothing."""
        scored: dict[KeptRun, FoundScores] = {}
        with self._changed:
            batch, self._waiting = self._waiting[:_MOST_AT_ONCE], self._waiting[_MOST_AT_ONCE:]
            limits = self._limits
            if not batch:
                # Scores are of runs that were given before them, and that have their numbers by now.
                scored, self._scored = self._scored, {}
            if not batch and not scored:
                self._end()
                return False
        try:
            if batch:
                self._add(batch, limits)
            else:
                self._score(scored)
        except NBEngineError as error:
            with self._changed:
                self._note_loss(len(batch), str(error))
        except Exception as error:
            with self._changed:
                self._note_loss(len(batch), f"{type(error).__name__}: {error}")
            raise
        return True

    def _add(self, batch: Sequence[tuple[Run, KeptRun]], limits: Limits) -> None:
        numbers = self.store.add([run for run, _ in batch], limits)
        for (_, kept), number in zip(batch, numbers, strict=True):
            kept.number = number
        self._note_success()

    def _score(self, scored: Mapping[KeptRun, FoundScores]) -> None:
        found = {kept.number: each for kept, each in scored.items() if kept.number is not None}
        # A run that could not be kept has been told of, and takes its scores along.
        if found:
            self.store.score(found)
            self._note_success()

    def _note_success(self) -> None:
        with self._changed:
            self._num_lost, self._trouble, self._has_told = 0, "", False

    def _end(self) -> None:
        self._is_writing = False
        self._changed.notify_all()

    def _note_loss(self, number: int, reason: str) -> None:
        self._num_lost += number
        self._trouble = reason


def flush_all(timeout: float = _FLUSH_SECONDS) -> None:
    """Wait until this process has written all its runs, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    for writer in list(_writers):
        writer.flush(max(0.0, deadline - time.monotonic()))


def _flush_at_exit() -> None:
    flush_all(_EXIT_SECONDS)


atexit.register(_flush_at_exit)
