"""The requests and answers of a cell when it ran before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import NBEngineError
from nbengine.frontend.runs.run import json_text
from nbengine.magics.answers.diff import Earlier
from nbengine.magics.generation.request import Request
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.kept_runs.recording import Recorder
from nbengine.magics.namespace import running_cell
from nbengine.widgets.words import print_quietly

_MOST_CELLS = 100
MOST_MAGICS = 100
"""The most executions of the magic that one run of a cell keeps: a loop may run it for hours."""
Settings = Mapping[str, Any]


class _Asked:
    """A request's prompt and answer; once it has ended, only the texts are kept."""

    def __init__(self, request: Request) -> None:
        self._known: GenerationResult | Earlier = request.result
        if request.result.finished:
            self._known = self.texts
        else:
            request.on_end.append(self._end)

    @property
    def texts(self) -> Earlier:
        """Return the prompt, and the answer as far as it has come."""
        known = self._known
        return known if isinstance(known, Earlier) else Earlier(known.prompt, known.text)

    def _end(self, error: NBEngineError | None) -> None:
        del error
        self._known = self.texts


@dataclass
class _Run:
    """One execution of a cell: each magic's requests by settings, in order, and those of the run before."""

    execution: str
    before: list[dict[str, Earlier]] = field(default_factory=list)
    magics: list[dict[str, _Asked]] = field(default_factory=list)


class EarlierAnswers:
    """The answers of each cell's last execution; where cells have no names, as in a terminal, all are one.

    A cell may run the magic several times: the first is compared with the first of the execution before, and
    so on, up to `MOST_MAGICS`. A request of a comparison is compared with the one that had the same settings.
    What the cell had in another kernel, before a restart, is found among the kept runs.
    """

    def __init__(self, shell: InteractiveShell, recorder: Recorder) -> None:
        self._shell = shell
        self._recorder = recorder
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    def begin(
        self, against: Earlier | None = None, *, looks_back: bool = False
    ) -> Callable[[Settings, Request], None]:
        """Return what notes each request that the running cell's next magic sends, and tells its result its
        predecessor.

        With `against` that is the predecessor of all. With `looks_back` the kept runs are read where this kernel
        knows nothing of the cell.
        """
        run = self._running(looks_back=looks_back)
        number = len(run.magics)
        earlier = run.before[number] if number < len(run.before) else {}
        asked: dict[str, _Asked] = {}

        def note(settings: Settings, request: Request) -> None:
            request.result.previous = against or earlier.get(_key(settings))
            if not asked and number < MOST_MAGICS:
                run.magics.append(asked)
            asked[_key(settings)] = _Asked(request)

        return note

    def _running(self, *, looks_back: bool) -> _Run:
        cell, execution = running_cell(self._shell)
        run = self._runs.get(cell)
        if run is None and cell and looks_back:
            run = self._runs[cell] = _Run(execution, self._kept(cell, execution))
        if run is None or not execution or run.execution != execution:
            magics = [] if run is None else run.magics
            before = [{key: asked.texts for key, asked in magic.items()} for magic in magics]
            run = self._runs[cell] = _Run(execution, before)
        self._runs.move_to_end(cell)
        if len(self._runs) > _MOST_CELLS:
            self._runs.popitem(last=False)
        return run

    def _kept(self, cell: str, execution: str) -> list[dict[str, Earlier]]:
        """Read what each magic of a cell's last execution had; empty, with a word about it, if that is not possible."""
        try:
            rows = self._recorder.before(cell, execution)
        except NBEngineError as error:
            print_quietly(str(error))
            return []
        magics: dict[object, dict[str, Earlier]] = {}
        for row in sorted(rows, key=lambda row: row["time"]):
            if row["kind"] != "chat":
                requests = magics.setdefault(row["comparison"] or row["run"], {})
                requests[_key(row["varied"])] = Earlier(row["prompt"], row["text"])
        return list(magics.values())


def _key(settings: Settings) -> str:
    return json_text(dict(settings))
