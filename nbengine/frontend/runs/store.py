"""The runs in the run store: they are added, chosen, changed and forgotten."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.runs.file import StoreFile, give_back
from nbengine.frontend.runs.run import JSON_COLUMNS, FoundScores, Limits, Run, RunFilter, json_text, storable
from nbengine.frontend.runs.schema import STEPS, Steps

_AT_ONCE = 500
"""The most values of one statement: some builds of SQLite take no more than 999."""
_MEGABYTE = 10**6
_DAY = 86400.0
_LEFT = 0.95
"""The part of the size that stays when the oldest runs go, so that they do not go one by one."""
_DELETE_OLDEST = """
DELETE FROM runs WHERE run IN (
    SELECT run FROM (SELECT run, sum(size) OVER (ORDER BY run) - size AS before FROM runs WHERE pinned = 0)
    WHERE before < ?
)"""
"""The oldest runs go whose texts together have a number of bytes, and at least one."""


class RunStore:
    """The runs in the file `path`, which is made when the first one is added; safe on any thread."""

    def __init__(self, path: Path, steps: Steps = STEPS) -> None:
        self._file = StoreFile(path, "runs", steps)

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self._file.path

    def add(self, runs: Sequence[Run], limits: Limits) -> list[int]:
        """Add runs, all of them or none, and remove the oldest ones beyond the limits; return the runs' numbers.

        Raises:
            NBEngineError: the file cannot be written; the message says why.
        """
        rows = [run.values() for run in runs]

        def insert(connection: sqlite3.Connection) -> tuple[list[int], bool]:
            connection.execute("BEGIN IMMEDIATE")
            numbers = [_insert(connection, row) for row in rows]
            has_pruned = _prune(connection, limits)
            connection.execute("COMMIT")
            return numbers, has_pruned

        numbers, has_pruned = self._file.do("kept", insert, makes_file=True)
        if has_pruned:
            self._file.do("pruned", give_back)
        return numbers

    def select(self, choice: RunFilter) -> list[dict[str, Any]]:
        """Return the runs that are chosen, the oldest first, as `Runs.rows` describes them.

        Raises:
            NBEngineError: the file cannot be read; the message says why.
        """
        if not self.path.exists():
            return []
        condition, values = _condition(choice)
        limit = -1 if choice.last is None else choice.last

        def read(connection: sqlite3.Connection) -> list[dict[str, Any]]:
            connection.create_function("contains", 2, _contains, deterministic=True)
            connection.create_function("answers_contain", 2, _answers_contain, deterministic=True)
            connection.row_factory = sqlite3.Row
            found = connection.execute(
                f"SELECT * FROM runs WHERE {condition} ORDER BY run DESC LIMIT ?", (*values, limit)
            )
            return [_row(each) for each in found][::-1]

        return self._file.do("read", read, only_reads=True)

    def answers_to(self, questions: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """Return the runs that have answered these questions to the end, by question, the latest first.

        Raises:
            NBEngineError: the file cannot be read; the message says why.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        if not self.path.exists():
            return found
        asked = list(dict.fromkeys(questions))

        def read(connection: sqlite3.Connection) -> None:
            found.clear()
            connection.row_factory = sqlite3.Row
            for start in range(0, len(asked), _AT_ONCE):
                some = asked[start : start + _AT_ONCE]
                rows = connection.execute(
                    f"SELECT * FROM runs WHERE question IN ({', '.join('?' * len(some))}) AND question != '' "
                    "AND error = '' AND finish_reason IN ('stop', 'length') ORDER BY run DESC",
                    some,
                )
                for row in rows:
                    found.setdefault(row["question"], []).append(_row(row))

        self._file.do("read", read, only_reads=True)
        return found

    def get(self, number: int) -> dict[str, Any]:
        """Return the run of a number.

        Raises:
            InvalidArgumentError: there is none.
            NBEngineError: the file cannot be read.
        """
        if 0 < number < 2**63:
            for row in self.select(RunFilter(numbers=(number,))):
                return row
        raise _missing(number)

    def change(
        self, number: int, *, pinned: bool | None = None, note: str | None = None, thumb: int | None = None
    ) -> None:
        """Pin a run or let it go, write its note, or give it a thumb: 1 is up, -1 down, 0 none.

        Raises:
            InvalidArgumentError: there is no such run.
            NBEngineError: the file cannot be written.
        """
        self.get(number)
        given = {"pinned": pinned, "note": None if note is None else storable(note), "thumb": thumb}
        changes = {name: value for name, value in given.items() if value is not None}

        def update(connection: sqlite3.Connection) -> int:
            names = ", ".join(f"{name} = :{name}" for name in changes)
            return connection.execute(
                f"UPDATE runs SET {names} WHERE run = :run", {**changes, "run": number}
            ).rowcount

        if not self._file.do("changed", update):
            raise _missing(number)

    def score(self, found: Mapping[int, FoundScores]) -> None:
        """Write the scores of runs by their numbers, all of them or none, in the place of those that they had.

        Raises:
            NBEngineError: the file cannot be written.
        """
        if not self.path.exists():
            return
        rows = [
            (storable(json_text(each.scores)), storable(json_text(each.judged)), number)
            for number, each in found.items()
        ]

        def update(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("UPDATE runs SET scores = ?, judged = ? WHERE run = ?", rows)
            connection.execute("COMMIT")

        self._file.do("changed", update)

    def forget(self, before: float | None = None) -> int:
        """Remove the runs that are not pinned, those asked before a `time.time()` or all; return their number.

        Their texts are overwritten in the file.

        Raises:
            NBEngineError: the file cannot be written.
        """
        if not self.path.exists():
            return 0

        def delete(connection: sqlite3.Connection) -> int:
            # Some builds of SQLite would leave the texts in pages that are free.
            connection.execute("PRAGMA secure_delete = ON")
            condition, values = ("", ()) if before is None else (" AND time < ?", (before,))
            return connection.execute(f"DELETE FROM runs WHERE pinned = 0{condition}", values).rowcount

        gone = self._file.do("removed", delete)
        self._file.do("removed", give_back)
        return gone


def _insert(connection: sqlite3.Connection, row: Mapping[str, Any]) -> int:
    """Insert a run in the open transaction, and return its number."""
    names = ", ".join(row)
    places = ", ".join(f":{name}" for name in row)
    number = connection.execute(f"INSERT INTO runs ({names}) VALUES ({places})", row).lastrowid
    assert number is not None
    return number


def _prune(connection: sqlite3.Connection, limits: Limits) -> bool:
    """Remove the oldest runs beyond the limits, in the open transaction; return whether any went."""
    gone = 0
    if limits.max_days is not None:
        oldest = time.time() - limits.max_days * _DAY
        gone += connection.execute("DELETE FROM runs WHERE pinned = 0 AND time < ?", (oldest,)).rowcount
    if _used_bytes(connection) > limits.max_mb * _MEGABYTE:
        gone += _shrink(connection, int(limits.max_mb * _MEGABYTE * _LEFT))
    return gone > 0


def _shrink(connection: sqlite3.Connection, size: int) -> int:
    """Remove the oldest runs that are not pinned until the others take `size` bytes; return how many have gone."""
    gone = 0
    while (beyond := _used_bytes(connection) - size) > 0:
        deleted = connection.execute(_DELETE_OLDEST, (beyond,)).rowcount
        if not deleted:
            break
        gone += deleted
    return gone


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    used: int = (pages - free) * size
    return used


def _condition(choice: RunFilter) -> tuple[str, list[Any]]:
    """Return the condition of a choice, and the values of its question marks."""
    parts: list[str] = []
    values: list[Any] = []
    if choice.numbers is not None:
        parts.append(f"run IN ({', '.join('?' * len(choice.numbers))})")
        values += choice.numbers
    for name in ("engine", "notebook", "cell", "execution", "comparison", "prompt_name", "prompt_version"):
        if (value := getattr(choice, name)) is not None:
            parts.append(f"{name} = ?")
            values.append(storable(value) if isinstance(value, str) else value)
    if choice.model is not None:
        parts.append("contains(?, model)")
        values.append(storable(choice.model).casefold())
    if choice.find is not None:
        parts.append(
            "(contains(?, prompt) OR contains(?, text) OR contains(?, note) OR answers_contain(?, outputs))"
        )
        values += [storable(choice.find).casefold()] * 4
    if choice.since is not None:
        parts.append("time >= ?")
        values.append(choice.since)
    if choice.errors:
        parts.append("error != ''")
    if choice.pinned:
        parts.append("pinned != 0")
    return " AND ".join(parts) or "true", values


def _contains(part: str, text: str) -> bool:
    return part in text.casefold()


def _answers_contain(part: str, outputs: str) -> bool:
    return any(_contains(part, answer["text"]) for answer in json.loads(outputs))


def _row(stored: sqlite3.Row) -> dict[str, Any]:
    row = {name: stored[name] for name in stored.keys() if name != "size"}  # noqa: SIM118 (a row iterates over values)
    row |= {name: json.loads(row[name]) for name in JSON_COLUMNS}
    row["pinned"] = bool(row["pinned"])
    more = {**row["scores"], **row["settings"]}
    return {**row, **{name: value for name, value in more.items() if name not in row}}


def _missing(number: int) -> InvalidArgumentError:
    return InvalidArgumentError("run", number, "the number of a kept run (`%runs` lists them)")
