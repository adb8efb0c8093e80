"""The prompts in the run store: each version of each name is a row, and stays as it is until it is deleted."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbengine.errors import InvalidArgumentError, did_you_mean
from nbengine.frontend.prompts.prompt import Example, Prompt
from nbengine.frontend.runs.file import StoreFile, give_back
from nbengine.frontend.runs.run import json_text, storable

_COLUMNS = "prompts.name, version, time, notebook, raw, defaults, source, examples"
_CURRENT = "turn = (SELECT max(turn) FROM prompts AS all_of WHERE all_of.name = prompts.name)"
_LIST = f"""
SELECT {_COLUMNS}, {_CURRENT} AS is_current,
    (SELECT count(*) FROM runs WHERE prompt_name = prompts.name AND prompt_version = version AND prompt_name != '')
        AS num_runs,
    (SELECT max(runs.time) FROM runs
        WHERE prompt_name = prompts.name AND prompt_version = version AND prompt_name != '') AS last_used
FROM prompts ORDER BY prompts.name, version"""
# Numbers of versions that have gone stay taken while runs name them.
_NEXT = """
SELECT 1 + max(
    coalesce((SELECT max(version) FROM prompts WHERE name = :name), 0),
    coalesce((SELECT max(prompt_version) FROM runs WHERE prompt_name = :name AND prompt_name != ''), 0))"""


@dataclass(frozen=True, slots=True)
class Listed:
    """A version of a prompt as it is listed: whether its name alone means it, and the kept runs that used it."""

    prompt: Prompt
    is_current: bool
    num_runs: int = 0
    last_used: float | None = None
    is_kept: bool = True
    """False: it lives in this kernel alone."""


class PromptStore:
    """The prompts in the file `path`, which is made when the first one is kept; safe on any thread.

    Raises:
        NBEngineError: of every method, where the file cannot be read or written; the message says why.
    """

    def __init__(self, path: Path) -> None:
        self._file = StoreFile(path, "prompts")

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self._file.path

    def keep(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Keep prompts, all of them or none, and return them with their versions.

        A prompt that is the same as a version that is kept becomes that version; any other one is a new version.
        Either is then the current one of its name.
        """

        def write(connection: sqlite3.Connection) -> list[Prompt]:
            connection.execute("BEGIN IMMEDIATE")
            kept = [_keep(connection, prompt) for prompt in prompts]
            connection.execute("COMMIT")
            return kept

        return self._file.do("kept", write, makes_file=True)

    def find(self, name: str, version: int | None = None) -> Prompt | None:
        """Return a version of a prompt, the current one if none is given; None if there is none."""
        wanted = _CURRENT if version is None else "version = ?"
        values = (storable(name),) if version is None else (storable(name), version)
        found = self._read(f"SELECT {_COLUMNS} FROM prompts WHERE prompts.name = ? AND {wanted}", values)
        return _prompt(found[0]) if found else None

    def next_version(self, name: str) -> int:
        """Return the number that the next version of a name would get."""
        found = self._read(_NEXT, {"name": storable(name)})
        return int(found[0][0]) if found else 1

    def select(self) -> list[Listed]:
        """Return all versions of all prompts, by name and version."""
        return [
            Listed(_prompt(row), bool(row["is_current"]), row["num_runs"], row["last_used"])
            for row in self._read(_LIST)
        ]

    def delete(self, name: str, version: int | None = None) -> int:
        """Delete a version of a prompt, all of them if none is given; return how many have gone.

        Their texts are overwritten in the file.
        """
        if not self.path.exists():
            return 0
        condition, values = ("", (name,)) if version is None else (" AND version = ?", (name, version))

        def remove(connection: sqlite3.Connection) -> int:
            connection.execute("PRAGMA secure_delete = ON")
            return connection.execute(f"DELETE FROM prompts WHERE name = ?{condition}", values).rowcount

        gone = self._file.do("removed", remove)
        self._file.do("removed", give_back)
        return gone

    def _read(self, query: str, values: Any = ()) -> list[sqlite3.Row]:
        if not self.path.exists():
            return []

        def read(connection: sqlite3.Connection) -> list[sqlite3.Row]:
            connection.row_factory = sqlite3.Row
            return connection.execute(query, values).fetchall()

        return self._file.do("read", read, only_reads=True)


def missing(name: str, version: int | None, known: Iterable[Prompt]) -> InvalidArgumentError:
    """Return the error that there is no such prompt; `known` are those that there are."""
    versions: dict[str, list[int]] = {}
    for prompt in known:
        versions.setdefault(prompt.name, []).append(prompt.version)
    if name in versions:
        numbers = ", ".join(map(str, sorted(versions[name])))
        return InvalidArgumentError(
            "prompt", f"{name}:{version}", f"a version that is kept: {name} has {numbers}"
        )
    hint = did_you_mean(name, versions) if versions else "; none is kept yet, and `%%prompt NAME` keeps one"
    return InvalidArgumentError("prompt", name, f"the name of a kept prompt (`%prompts` lists them{hint})")


def _keep(connection: sqlite3.Connection, prompt: Prompt) -> Prompt:
    connection.row_factory = sqlite3.Row
    turn = connection.execute("SELECT 1 + coalesce(max(turn), 0) FROM prompts").fetchone()[0]
    same = connection.execute(
        f"SELECT {_COLUMNS} FROM prompts WHERE prompts.name = ? AND digest = ?", (prompt.name, prompt.digest)
    ).fetchone()
    if same is not None:
        values = (turn, prompt.name, same["version"])
        connection.execute("UPDATE prompts SET turn = ? WHERE name = ? AND version = ?", values)
        return _prompt(same)
    version = connection.execute(_NEXT, {"name": prompt.name}).fetchone()[0]
    kept = replace(prompt, version=version, time=prompt.time or time.time())
    row = {
        "name": kept.name,
        "version": version,
        "turn": turn,
        "time": kept.time,
        "digest": kept.digest,
        "notebook": storable(kept.notebook),
        "raw": kept.raw,
        "defaults": json_text(dict(kept.defaults)),
        "source": kept.source,
        "examples": storable(json_text([[each.question, each.answer] for each in kept.examples])),
    }
    places = ", ".join(f":{name}" for name in row)
    connection.execute(f"INSERT INTO prompts ({', '.join(row)}) VALUES ({places})", row)
    return kept


def _prompt(row: sqlite3.Row) -> Prompt:
    return Prompt(
        name=row["name"],
        source=row["source"],
        raw=bool(row["raw"]),
        defaults=json.loads(row["defaults"]),
        examples=tuple(Example(*each) for each in json.loads(row["examples"])),
        version=row["version"],
        time=row["time"],
        notebook=row["notebook"],
    )
