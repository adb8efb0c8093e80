"""The run store keeps what it is given, finds it again, and stays within its limits."""

from __future__ import annotations

import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from runs_made import made_run

from nbengine.errors import InvalidArgumentError, NBEngineError
from nbengine.frontend.runs.run import FoundScores, Limits, Run, RunFilter
from nbengine.frontend.runs.schema import STEPS, bring_up_to_date
from nbengine.frontend.runs.store import RunStore

FIRST_VERSION = Path(__file__).parents[3] / "data" / "runs" / "version_1.sql"
"""A store as the first version has written it, as the statements that make it."""
NO_LIMITS = Limits(max_days=None, max_mb=10_000)
ALL = RunFilter()
DAY = 86400.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile" / "nbengine" / "runs.sqlite"


@pytest.fixture
def store(path: Path) -> RunStore:
    return RunStore(path)


def numbers(store: RunStore, **choice: Any) -> list[int]:
    return [row["run"] for row in store.select(RunFilter(**choice))]


def prompts(store: RunStore, **choice: Any) -> list[str]:
    return [row["prompt"] for row in store.select(RunFilter(**choice))]


def test_all_that_a_run_has_comes_back(store: RunStore) -> None:
    full = made_run(
        kind="comparison",
        prompt="Ein 'Zitat' \"x\"; DROP TABLE runs; \0 🙂",
        text="line\r\nline\ttab",
        error="RequestError: no",
        tokens=3,
        prompt_tokens=7,
        cached_tokens=5,
        settings={"temperature": 0.5, "stop": ["a"], "logit_bias": {5: -1.0}},
        varied={"word": "é"},
        metrics={"ttft": 0.25, "itl": None},
        outputs=[{"text": "a", "finish_reason": "stop", "tokens": 1}],
        messages=[{"role": "user", "content": "é"}],
        comparison="c",
        notebook="/n.ipynb",
        cell="cell",
        execution="execution",
    )
    store.add([full, made_run()], NO_LIMITS)
    row, other = store.select(ALL)
    own = asdict(full)
    own["settings"]["logit_bias"] = {"5": -1.0}  # JSON has texts as keys
    assert {name: row[name] for name in own} == own
    assert (row["run"], row["pinned"], row["note"]) == (1, False, "")
    assert (row["temperature"], row["stop"]) == (0.5, ["a"])
    assert (other["run"], other["outputs"], other["varied"]) == (2, [], {})
    assert store.get(2) == other


def test_text_that_no_file_can_hold_becomes_an_escape(store: RunStore) -> None:
    store.add([made_run(prompt="half \ud83d", messages=[{"content": "half \ud83d"}])], NO_LIMITS)
    (row,) = store.select(RunFilter(find="half \ud83d"))
    assert row["prompt"] == "half \\ud83d"
    assert row["messages"] == [{"content": "half \ud83d"}]


def test_objects_that_are_no_json_are_kept_as_text(store: RunStore) -> None:
    class Silent:
        def __str__(self) -> str:
            raise RuntimeError

    store.add([made_run(varied={"path": Path("/a"), "silent": Silent()})], NO_LIMITS)
    assert store.get(1)["varied"] == {"path": "/a", "silent": "<Silent>"}


def test_only_its_owner_can_read_it(store: RunStore, path: Path) -> None:
    store.add([made_run()], NO_LIMITS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    store.add([made_run()], NO_LIMITS)
    with closing(sqlite3.connect(path)) as reader:
        # Somebody who reads keeps the write-ahead log there.
        reader.execute("SELECT * FROM runs").fetchall()
        store.add([made_run()], NO_LIMITS)
        assert [stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()] == [0o600] * 3


def test_reading_makes_no_file(store: RunStore, path: Path) -> None:
    assert store.select(ALL) == []
    assert store.forget() == 0
    with pytest.raises(InvalidArgumentError, match="run must be the number of a kept run"):
        store.change(1, pinned=True)
    assert not path.parent.exists()


def test_a_store_that_somebody_has_removed_is_made_again(store: RunStore, path: Path) -> None:
    store.add([made_run()], NO_LIMITS)
    path.unlink()
    store.add([made_run(prompt="again")], NO_LIMITS)
    assert prompts(store) == ["again"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"find": "STRASSE"}, [2]),
        ({"find": "100%_x"}, [3]),
        ({"find": "second"}, [4]),
        ({"find": "remember"}, [5]),
        ({"find": "finish"}, []),
        ({"model": "QWEN"}, [2, 3]),
        ({"engine": "b"}, [4]),
        ({"engine": "bo"}, []),
        ({"errors": True}, [3]),
        ({"pinned": True}, [5]),
        ({"since": 300.0}, [3, 4, 5]),
        ({"last": 2}, [4, 5]),
        ({"last": 1, "model": "qwen"}, [3]),
        ({"numbers": (5, 1, 9)}, [1, 5]),
        ({"numbers": ()}, []),
        ({"cell": "one", "notebook": "n"}, [1]),
        ({"comparison": "grid"}, [4]),
    ],
)
def test_runs_are_chosen_by_what_they_have(
    store: RunStore, choice: dict[str, Any], expected: list[int]
) -> None:
    runs = [
        made_run(time=100.0, cell="one", notebook="n"),
        made_run(time=200.0, prompt="Wo ist die Straße?", model="a/Qwen3"),
        made_run(time=300.0, text="100%_X", model="qwen", error="RequestError: x"),
        made_run(time=400.0, engine="b", comparison="grid", outputs=[{"text": "first"}, {"text": "Second"}]),
        made_run(time=500.0),
    ]
    store.add(runs, NO_LIMITS)
    store.change(5, pinned=True, note="to remember")
    assert numbers(store, **choice) == expected


def test_pins_and_notes_come_and_go(store: RunStore) -> None:
    store.add([made_run(), made_run()], NO_LIMITS)
    store.change(2, pinned=True)
    store.change(2, note="good \udc00")
    assert [(row["pinned"], row["note"]) for row in store.select(ALL)] == [
        (False, ""),
        (True, "good \\udc00"),
    ]
    store.change(2, pinned=False, note="")
    assert [(row["pinned"], row["note"]) for row in store.select(ALL)] == [(False, ""), (False, "")]
    for number in (3, 0, 2**70):
        with pytest.raises(InvalidArgumentError, match="run must be the number of a kept run"):
            store.change(number, note="x")


def test_old_runs_go_unless_they_are_pinned(store: RunStore) -> None:
    now = time.time()
    store.add([made_run(time=now - days * DAY, prompt=str(days)) for days in (40, 31, 29, 1)], NO_LIMITS)
    store.change(1, pinned=True)
    store.add([made_run(prompt="new")], Limits(max_days=30, max_mb=100))
    assert prompts(store) == ["40", "29", "1", "new"]
    # A number is never given again.
    assert numbers(store) == [1, 3, 4, 5]


def test_the_file_stays_within_its_size_and_keeps_the_latest_and_the_pinned(
    store: RunStore, path: Path
) -> None:
    limits = Limits(max_days=None, max_mb=1)
    store.add([made_run(text="p" * 20_000)], limits)
    store.change(1, pinned=True)
    for number in range(2, 302):
        store.add([made_run(text=f"{number} " + "x" * 10_000)], limits)
    left = numbers(store)
    assert left[0] == 1
    assert left[1:] == list(range(left[1], 302))
    assert 60 < len(left) < 100
    assert path.stat().st_size <= 1_100_000


def test_a_run_beyond_the_size_goes_and_pinned_ones_stay_whatever_they_take(store: RunStore) -> None:
    store.add([made_run(text="x" * 700_000), made_run(text="x" * 700_000)], NO_LIMITS)
    store.change(1, pinned=True)
    store.change(2, pinned=True)
    store.add([made_run(text="x" * 2_000_000)], Limits(max_days=None, max_mb=1))
    assert numbers(store) == [1, 2]


def test_what_is_forgotten_is_no_longer_in_the_file(store: RunStore, path: Path) -> None:
    now = time.time()
    store.add(
        [made_run(text="a secret word" * 1000, time=now - 10 * DAY), made_run(text="another secret")],
        NO_LIMITS,
    )
    store.add([made_run(text="kept for ever")], NO_LIMITS)
    store.change(3, pinned=True)
    assert store.forget(before=now - DAY) == 1
    assert numbers(store) == [2, 3]
    assert store.forget() == 1
    assert numbers(store) == [3]
    everything = b"".join(each.read_bytes() for each in path.parent.iterdir())
    assert b"secret" not in everything
    assert b"kept for ever" in everything


def test_several_writers_at_once_lose_nothing(path: Path) -> None:
    def write(writer: int) -> None:
        for index in range(20):
            RunStore(path).add([made_run(prompt=f"{writer}-{index}")], NO_LIMITS)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = RunStore(path)
    assert sorted(prompts(store)) == sorted(f"{writer}-{index}" for writer in range(4) for index in range(20))
    assert numbers(store) == list(range(1, 81))


def test_a_store_of_an_older_version_gets_what_is_new_and_keeps_its_runs(path: Path) -> None:
    RunStore(path).add([made_run(prompt="of old")], NO_LIMITS)
    newer = (*STEPS, ("ALTER TABLE runs ADD COLUMN colour TEXT NOT NULL DEFAULT 'grey'",))
    store = RunStore(path, newer)
    (row,) = store.select(ALL)
    assert (row["prompt"], row["colour"]) == ("of old", "grey")
    store.add([made_run(prompt="of now")], NO_LIMITS)
    assert prompts(store) == ["of old", "of now"]


def test_a_step_that_fails_leaves_the_older_version_as_it_was(path: Path) -> None:
    RunStore(path).add([made_run(prompt="of old")], NO_LIMITS)
    broken = (*STEPS, ("ALTER TABLE runs ADD COLUMN colour TEXT", "ALTER TABLE none ADD COLUMN x TEXT"))
    with pytest.raises(NBEngineError, match="cannot be read: no such table: none"):
        RunStore(path, broken).select(ALL)
    (row,) = RunStore(path).select(ALL)
    assert row["prompt"] == "of old"
    assert "colour" not in row


def test_a_store_of_the_first_version_can_be_read_and_written(store: RunStore, path: Path) -> None:
    path.parent.mkdir(0o700, parents=True)
    with sqlite3.connect(path) as connection:
        connection.executescript(FIRST_VERSION.read_text())
    connection.close()
    store.add([made_run(prompt="of now")], NO_LIMITS)
    first, second, third = store.select(ALL)
    assert (first["prompt"], first["text"], first["temperature"]) == ("why is the sky blue?", "because", 0.5)
    assert (second["pinned"], second["note"], second["messages"][0]["role"]) == (True, "the best", "system")
    assert (third["run"], third["prompt"]) == (3, "of now")
    store.score({1: FoundScores({"short": True}, {})})
    assert [row["scores"] for row in store.select(ALL)] == [{"short": True}, {}, {}]


def test_scores_come_to_their_runs_and_those_of_a_run_that_has_gone_nowhere(
    store: RunStore, path: Path
) -> None:
    store.score({1: FoundScores({"early": 1}, {})})
    assert not path.exists()
    store.add([made_run(settings={"temperature": 0.5}), made_run()], NO_LIMITS)
    found = FoundScores({"good": [0.5, None], "temperature": 3, "half \ud83d": True}, {"digest": "4"})
    store.score({2: FoundScores({"good": False}, {}), 1: found, 9: found})
    first, second = store.select(ALL)
    assert first["scores"] == found.scores
    assert (first["judged"], first["good"], first["temperature"]) == ({"digest": "4"}, [0.5, None], 0.5)
    assert (second["scores"], second["good"], second["judged"]) == ({"good": False}, False, {})
    store.score({2: FoundScores({"other": 1}, {})})
    assert store.get(2)["scores"] == {"other": 1}


def of_a_newer_version(path: Path) -> None:
    RunStore(path, (*STEPS, ("ALTER TABLE runs ADD COLUMN colour TEXT",))).add([made_run()], NO_LIMITS)


def no_database(path: Path) -> None:
    path.parent.mkdir(0o700, parents=True)
    path.write_text("my diary\n" * 1000)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(of_a_newer_version, "a newer nbengine has written them"), (no_database, "file is not a database")],
)
def test_what_it_does_not_understand_it_leaves_alone(
    store: RunStore, path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(path)
    before = path.read_bytes()
    for action, purpose in (
        (lambda: store.add([made_run()], NO_LIMITS), "kept"),
        (lambda: store.select(ALL), "read"),
        (lambda: store.forget(), "removed"),
    ):
        with pytest.raises(NBEngineError, match=rf"cannot be {purpose}: {reason}.*NBENGINE_RUNS_DIR chooses"):
            action()
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    store = RunStore(tmp_path / "profile" / "nbengine" / "runs.sqlite")
    with pytest.raises(NBEngineError, match=r"cannot be kept: .*Not a directory; NBENGINE_RUNS_DIR chooses"):
        store.add([made_run()], NO_LIMITS)


def test_a_lock_that_stays_is_an_error_and_one_that_goes_is_none(
    store: RunStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add([made_run()], NO_LIMITS)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("nbengine.frontend.runs.file.BUSY_SECONDS", 0.0)
    with pytest.raises(NBEngineError, match="cannot be kept: database is locked"):
        store.add([made_run()], NO_LIMITS)
    monkeypatch.setattr("nbengine.frontend.runs.file.BUSY_SECONDS", 60.0)
    waiting = threading.Thread(target=store.add, args=([made_run()], NO_LIMITS))
    waiting.start()
    assert len(store.select(ALL)) == 1  # reading waits for nobody
    other.execute("COMMIT")
    waiting.join()
    other.close()
    assert len(store.select(ALL)) == 2


def test_a_lock_that_sqlite_does_not_wait_for_is_waited_for(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def locked_twice(connection: sqlite3.Connection, steps: Any) -> None:
        calls.append(1)
        if len(calls) < 3:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY | 1 << 8  # as while another process recovers the log
            raise error
        bring_up_to_date(connection, steps)

    monkeypatch.setattr("nbengine.frontend.runs.file.bring_up_to_date", locked_twice)
    store.add([made_run()], NO_LIMITS)
    assert len(calls) == 3
    assert numbers(store) == [1]


def test_all_runs_of_one_call_are_kept_or_none(store: RunStore) -> None:
    store.add([made_run()], NO_LIMITS)
    wrong: Any = {"time": None}
    with pytest.raises(NBEngineError, match=r"NOT NULL constraint failed: runs\.time"):
        store.add([made_run(), made_run(**wrong)], NO_LIMITS)
    assert numbers(store) == [1]


def test_the_size_of_a_run_counts_its_texts() -> None:
    small: Run = made_run(text="x")
    assert made_run(text="x" * 1001).values()["size"] - small.values()["size"] == 1000
