"""The tables of the run store, and the way from an older version of it to the present one.

`PRAGMA user_version` holds the number of steps that a file has behind it. A step is never changed once a release
has it: another one is added behind it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from nbengine.errors import NBEngineError

Steps = Sequence[Sequence[str]]

# What is small comes first: SQLite reads it without the pages of the long texts.
STEPS: Steps = (
    (
        """CREATE TABLE runs (
            run INTEGER PRIMARY KEY AUTOINCREMENT,
            time REAL NOT NULL,
            size INTEGER NOT NULL,
            pinned INTEGER NOT NULL DEFAULT 0,
            note TEXT NOT NULL DEFAULT '',
            kind TEXT NOT NULL,
            engine TEXT NOT NULL,
            model TEXT NOT NULL,
            model_version TEXT NOT NULL,
            nbengine TEXT NOT NULL,
            notebook TEXT NOT NULL,
            cell TEXT NOT NULL,
            execution TEXT NOT NULL,
            comparison TEXT NOT NULL,
            finish_reason TEXT,
            error TEXT NOT NULL,
            tokens INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            metrics TEXT NOT NULL,
            varied TEXT NOT NULL,
            settings TEXT NOT NULL,
            prompt TEXT NOT NULL,
            text TEXT NOT NULL,
            outputs TEXT NOT NULL,
            messages TEXT NOT NULL
        )""",
        "CREATE INDEX runs_by_time ON runs (time)",
        "CREATE INDEX runs_by_cell ON runs (cell, run)",
    ),
    (
        "ALTER TABLE runs ADD COLUMN question TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE runs ADD COLUMN thumb INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX runs_by_question ON runs (question, run) WHERE question != ''",
    ),
    (
        # `turn` grows each time when a version is kept: the version with the largest one is the current one.
        """CREATE TABLE prompts (
            name TEXT NOT NULL,
            version INTEGER NOT NULL,
            turn INTEGER NOT NULL,
            time REAL NOT NULL,
            digest TEXT NOT NULL,
            notebook TEXT NOT NULL,
            raw INTEGER NOT NULL,
            defaults TEXT NOT NULL,
            source TEXT NOT NULL,
            examples TEXT NOT NULL,
            PRIMARY KEY (name, version)
        )""",
        "ALTER TABLE runs ADD COLUMN prompt_name TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE runs ADD COLUMN prompt_version INTEGER",
        "ALTER TABLE runs ADD COLUMN prompt_values TEXT NOT NULL DEFAULT '{}'",
        "CREATE INDEX runs_by_prompt ON runs (prompt_name, prompt_version) WHERE prompt_name != ''",
    ),
    (
        "ALTER TABLE runs ADD COLUMN scores TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE runs ADD COLUMN judged TEXT NOT NULL DEFAULT '{}'",
    ),
)
"""The statements of each step."""


def bring_up_to_date(connection: sqlite3.Connection, steps: Steps) -> None:
    """Make the tables in a new file, or change an older version of it; leave a newer one alone.

    Raises:
        NBEngineError: a newer nbengine has written the file.
        sqlite3.Error: the file cannot be read or written.
    """
    version = version_of(connection)
    if version == len(steps):
        return
    if version > len(steps):
        raise NBEngineError(
            f"a newer nbengine has written them (version {version} of the store, this one knows {len(steps)}); "
            "they stay as they are"
        )
    # These two take effect in a file without tables, and outside of a transaction.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    # Another process may have come first.
    for step in steps[version_of(connection) :]:
        for statement in step:
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {max(version_of(connection), len(steps))}")
    connection.execute("COMMIT")


def version_of(connection: sqlite3.Connection) -> int:
    """Return the number of steps that the file has behind it."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version
