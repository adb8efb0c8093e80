"""`nbengine.runs()`: the runs that are kept, as rows and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbengine.checks import require_bool, require_int, require_number
from nbengine.errors import InvalidTypeError
from nbengine.frontend.runs.place import store_path
from nbengine.frontend.runs.run import RunFilter
from nbengine.frontend.runs.store import RunStore
from nbengine.frontend.runs.writer import flush_all
from nbengine.metrics.frames import frame_of


class Runs:
    """The runs that fit a choice, read from the store whenever they are asked for; `runs[12]` is run 12.

    Raises:
        NBEngineError: the store cannot be read, when rows are asked for; the message says why.
    """

    def __init__(self, store: RunStore, choice: RunFilter) -> None:
        self._store = store
        self._choice = choice

    def rows(self) -> list[dict[str, Any]]:
        """List one dict for each run, the oldest first.

        A row has the number `run`, `time` (the `time.time()` at which it was asked), `engine`, `model`,
        `model_version`, `nbengine` (its version), `kind` ("generate", "comparison" or "chat"), `prompt`,
        `messages`, `text`, `outputs` (all completions, where there are several), `finish_reason`, `error`,
        `tokens`, `prompt_tokens`, `cached_tokens`, `metrics`, `comparison` and `varied` (what distinguishes it
        there), `notebook`, `cell`, `execution`, `pinned`, `note`, `thumb`, `scores` by name, and `prompt_name`,
        `prompt_version` and `prompt_values` where a kept prompt was asked with. `settings` has the sampling
        parameters, `system` and what else went into the prompt; each of them, and each score, is a key of the
        row, too. `metrics` has seconds (`ttft`, `itl`, `queued`, `total`), `tokens_per_second` and
        `preemptions`, None where there is no such figure.
        """
        flush_all()
        return self._store.select(self._choice)

    def to_frame(self) -> Any:
        """Return `rows()` as a pandas DataFrame.

        Raises:
            NotSupportedError: pandas is not installed.
        """
        return frame_of(self.rows())

    def __getitem__(self, number: int) -> dict[str, Any]:
        flush_all()
        return self._store.get(require_int("run", number))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len(self.rows())

    def __repr__(self) -> str:
        return f"Runs({len(self)} in {str(self._store.path)!r})"


def runs(
    *,
    find: str | None = None,
    model: str | None = None,
    engine: str | None = None,
    since: float | None = None,
    errors: bool = False,
    pinned: bool = False,
    last: int | None = None,
    prompt_name: str | None = None,
    prompt_version: int | None = None,
) -> Runs:
    """Return the prompts that were asked in this user's notebooks, with their answers; all conditions must hold.

    Args:
        find: a text in the prompt, an answer or the note; the case of letters does not matter.
        model: a part of the model's name; the case of letters does not matter.
        engine: the engine's name.
        since: a `time.time()`: runs that were asked then or later.
        errors: only runs that an error has ended.
        pinned: only runs that are pinned.
        last: the most runs, the latest of those that fit.
        prompt_name: the name of the kept prompt that was asked with.
        prompt_version: its version.

    Raises:
        InvalidArgumentError, InvalidTypeError: an argument.
    """
    choice = RunFilter(
        find=_optional_text("find", find),
        model=_optional_text("model", model),
        engine=_optional_text("engine", engine),
        since=None if since is None else require_number("since", since),
        errors=require_bool("errors", errors),
        pinned=require_bool("pinned", pinned),
        last=None if last is None else require_int("last", last),
        prompt_name=_optional_text("prompt_name", prompt_name),
        prompt_version=None if prompt_version is None else require_int("prompt_version", prompt_version),
    )
    return Runs(RunStore(store_path()), choice)


def _optional_text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidTypeError(name, value, "a string, or None")
    return value
