"""What a cell had asked and got when it ran before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import NBEngineError
from nbengine.magics.generation.answers import AnsweredGeneration
from nbengine.magics.generation.diff import Earlier
from nbengine.magics.generation.result import GenerationResult

_MOST_CELLS = 100
MOST_MAGICS = 100
"""Of one execution: a loop may run the magic for hours."""
Settings = Mapping[str, Any]


class _Asked:
    """What a request asked and has got; from its end on it keeps the texts alone."""

    def __init__(self, generation: AnsweredGeneration) -> None:
        self._known: GenerationResult | Earlier = generation.result
        if generation.result.finished:
            self._known = self.texts
        else:
            generation.on_end.append(self._end)

    @property
    def texts(self) -> Earlier:
        """Those there are by now."""
        known = self._known
        return known if isinstance(known, Earlier) else Earlier(known.prompt, known.text)

    def _end(self, shown: bool, error: NBEngineError | None) -> None:
        del shown, error
        self._known = self.texts


@dataclass
class _Run:
    """One execution of a cell: what each magic in it asked, in their order, by settings; and what the last one had."""

    execution: object
    before: list[dict[str, Earlier]] = field(default_factory=list)
    magics: list[dict[str, _Asked]] = field(default_factory=list)


class EarlierAnswers:
    """The answers of each cell's last execution. In a terminal, and where a frontend names no cells, all are one cell.

    A cell may run the magic several times: the first is compared with the first of the execution before, and so on, up
    to `MOST_MAGICS`. A request of a comparison is compared with the one that had the same settings.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    def note(self, asked: Sequence[tuple[Settings, AnsweredGeneration]]) -> None:
        """The running cell has sent these requests; each result learns what it had been before."""
        run = self._running()
        number = len(run.magics)
        earlier = run.before[number] if number < len(run.before) else {}
        for settings, generation in asked:
            generation.result.previous = earlier.get(_key(settings))
        if number < MOST_MAGICS:
            run.magics.append({_key(settings): _Asked(generation) for settings, generation in asked})

    def _running(self) -> _Run:
        cell, execution = self._place()
        run = self._runs.get(cell)
        if run is None or execution is None or run.execution != execution:
            magics = [] if run is None else run.magics
            before = [{key: asked.texts for key, asked in magic.items()} for magic in magics]
            run = self._runs[cell] = _Run(execution, before)
        self._runs.move_to_end(cell)
        if len(self._runs) > _MOST_CELLS:
            self._runs.popitem(last=False)
        return run

    def _place(self) -> tuple[str, object]:
        parent: Any = getattr(self._shell, "get_parent", dict)() or {}
        cell = (parent.get("metadata") or {}).get("cellId")
        return str(cell or ""), (parent.get("header") or {}).get("msg_id")


def _key(settings: Settings) -> str:
    return repr(dict(settings))
