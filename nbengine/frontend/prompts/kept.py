"""`nbengine.prompts()`: the prompts that are kept, by their names, as rows and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbengine.errors import InvalidTypeError
from nbengine.frontend.prompts.prompt import Prompt, named
from nbengine.frontend.prompts.store import PromptStore, missing
from nbengine.frontend.runs.place import store_path
from nbengine.frontend.runs.writer import flush_all
from nbengine.metrics.frames import frame_of


class Prompts:
    """The kept prompts, read from the store whenever they are asked for.

    `prompts["capital"]` is the current version of a prompt, `prompts["capital:2"]` its second one, and iterating
    gives the current version of each.

    Raises:
        NBEngineError: the store cannot be read; the message says why.
    """

    def __init__(self, store: PromptStore) -> None:
        self._store = store

    def rows(self) -> list[dict[str, Any]]:
        """List one dict for each version of each prompt, by name and version.

        A row has `name`, `version`, `current` (whether the name alone means this version), `time` (the `time.time()` at
        which it was kept first), `variables`, `defaults`, `examples` (the number of them), `raw`, `text` (as it was
        written), `notebook`, and of the kept runs that used it the number `runs` and the `time.time()` `last_used`, None if
        there is none.
        """
        flush_all()
        return [
            {
                "name": each.prompt.name,
                "version": each.prompt.version,
                "current": each.is_current,
                "time": each.prompt.time,
                "variables": list(each.prompt.variables),
                "defaults": dict(each.prompt.defaults),
                "examples": len(each.prompt.examples),
                "raw": each.prompt.raw,
                "text": each.prompt.source,
                "runs": each.num_runs,
                "last_used": each.last_used,
                "notebook": each.prompt.notebook,
            }
            for each in self._store.select()
        ]

    def to_frame(self) -> Any:
        """Return `rows()` as a pandas DataFrame.

        Raises:
            NotSupportedError: pandas is not installed.
        """
        return frame_of(self.rows())

    def __getitem__(self, name: str) -> Prompt:
        if not isinstance(name, str):
            raise InvalidTypeError("prompt", name, "a string, NAME or NAME:VERSION")
        wanted = named(name)
        prompt = self._store.find(*wanted)
        if prompt is None:
            raise missing(*wanted, (each.prompt for each in self._store.select()))
        return prompt

    def __iter__(self) -> Iterator[Prompt]:
        return (each.prompt for each in self._store.select() if each.is_current)

    def __len__(self) -> int:
        return sum(each.is_current for each in self._store.select())

    def __repr__(self) -> str:
        return f"Prompts({len(self)} in {str(self._store.path)!r})"


def prompts() -> Prompts:
    """Return the prompts that `%%prompt` has kept in this user's notebooks.

    `nbengine.prompts()["capital"].messages(country="Peru")` are the messages of one, as `LLM.chat` takes them.
    """
    return Prompts(PromptStore(store_path()))
