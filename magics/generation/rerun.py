"""What a cell had asked and got when it ran before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.generation.diff import Earlier
from nbengine.magics.generation.result import GenerationResult

_MOST_CELLS = 100
Settings = Mapping[str, Any]


@dataclass
class _Run:
    """One execution of a cell: the answers of each magic in it, in their order."""

    execution: object
    magics: list[list[tuple[Settings, GenerationResult]]] = field(default_factory=list)
    before: list[dict[str, Earlier]] = field(default_factory=list)


class EarlierAnswers:
    """The answers of each cell's last execution. In a terminal, and where a frontend names no cells, all are one cell.

    A cell may run the magic several times: the first is compared with the first of the execution before, and so on. A
    request of a comparison is compared with the one that had the same settings.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    def note(self, answers: list[tuple[Settings, GenerationResult]]) -> None:
        """The running cell has sent these requests; each learns what it had been before."""
        cell, execution = self._place()
        run = self._runs.get(cell)
        if run is None or execution is None or run.execution != execution:
            before = [_texts(asked) for asked in run.magics] if run is not None else []
            run = self._runs[cell] = _Run(execution, before=before)
        self._runs.move_to_end(cell)
        if len(self._runs) > _MOST_CELLS:
            self._runs.popitem(last=False)
        earlier = run.before[min(len(run.magics), len(run.before) - 1)] if run.before else {}
        run.magics.append(answers)
        for settings, result in answers:
            result.previous = earlier.get(_key(settings))

    def _place(self) -> tuple[str, object]:
        parent: Any = getattr(self._shell, "get_parent", dict)() or {}
        cell = (parent.get("metadata") or {}).get("cellId")
        return str(cell or ""), (parent.get("header") or {}).get("msg_id")


def _texts(answers: list[tuple[Settings, GenerationResult]]) -> dict[str, Earlier]:
    return {_key(settings): Earlier(result.prompt, result.text) for settings, result in answers}


def _key(settings: Settings) -> str:
    return repr(dict(settings))
