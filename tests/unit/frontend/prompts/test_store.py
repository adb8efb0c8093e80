"""Prompts are kept beside the runs: in versions that stay, for several kernels, through whatever happens to the disk."""

from __future__ import annotations

import sqlite3
import stat
import threading
from pathlib import Path

import pytest

import nbengine
from nbengine.errors import InvalidArgumentError, InvalidTypeError, NBEngineError
from nbengine.frontend.prompts.prompt import Example, Prompt
from nbengine.frontend.prompts.store import PromptStore
from nbengine.frontend.runs.run import Limits, Run, RunFilter
from nbengine.frontend.runs.schema import STEPS
from nbengine.frontend.runs.store import RunStore

FIRST_VERSION = Path(__file__).parents[3] / "data" / "runs" / "version_1.sql"
NO_LIMITS = Limits(max_days=None, max_mb=10_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile" / "nbengine" / "runs.sqlite"


@pytest.fixture
def store(path: Path) -> PromptStore:
    return PromptStore(path)


def kept(store: PromptStore, source: str, name: str = "a") -> int:
    """Keep a prompt, and return its version."""
    (prompt,) = store.keep([Prompt(name, source)])
    return prompt.version


def use(path: Path, version: int, time: float, name: str = "a") -> None:
    """Keep a run that was asked with a prompt."""
    run = Run(time, "generate", "e", "m", "", "0", "p", "t", "stop", prompt_name=name, prompt_version=version)
    RunStore(path).add([run], NO_LIMITS)


def test_all_that_a_prompt_has_comes_back(store: PromptStore) -> None:
    prompt = Prompt(
        "über",
        "'quoted' \"x\"; DROP TABLE prompts; \0 🙂 {x} {y}",
        raw=True,
        defaults={"x": "é\n"},
        examples=(Example("q\ud83d", "a"),),
        notebook="/n.ipynb",
    )
    (first,) = store.keep([prompt])
    found = store.find("über")
    assert found is not None
    assert (found.version, found.time) == (1, first.time)
    assert (found.source, found.raw, dict(found.defaults), found.notebook) == (
        prompt.source,
        True,
        {"x": "é\n"},
        "/n.ipynb",
    )
    assert store.find("über", 2) is None
    assert store.find("other") is None


def test_the_same_text_is_the_same_version_and_a_change_makes_a_new_one(store: PromptStore) -> None:
    assert [kept(store, text) for text in ("one", "one", "two", "one", "three")] == [1, 1, 2, 1, 3]
    assert kept(store, "one", "b") == 1


def test_the_name_alone_means_the_version_that_was_kept_last(store: PromptStore) -> None:
    for text in ("one", "two", "one"):
        kept(store, text)
    current, older = store.find("a"), store.find("a", 2)
    assert current is not None
    assert older is not None
    assert (current.source, older.source) == ("one", "two")
    assert [(each.prompt.version, each.is_current) for each in store.select()] == [(1, True), (2, False)]


def test_runs_are_counted_for_their_version(store: PromptStore, path: Path) -> None:
    kept(store, "one")
    kept(store, "two")
    kept(store, "one", "b")
    for version, time in ((1, 5.0), (1, 9.0), (2, 7.0)):
        use(path, version, time)
    assert [(each.prompt.reference, each.num_runs, each.last_used) for each in store.select()] == [
        ("a:1", 2, 9.0),
        ("a:2", 1, 7.0),
        ("b:1", 0, None),
    ]
    choice = RunFilter(prompt_name="a", prompt_version=1)
    assert [row["time"] for row in RunStore(path).select(choice)] == [5.0, 9.0]


def test_a_number_that_runs_name_is_not_given_again(store: PromptStore, path: Path) -> None:
    kept(store, "one")
    kept(store, "two")
    use(path, 2, 1.0)
    assert store.delete("a", 1) == 1
    assert store.delete("a") == 1
    assert store.delete("a") == 0
    assert store.next_version("a") == 3
    assert kept(store, "one") == 3
    assert len(RunStore(path).select(RunFilter())) == 1


def test_what_is_deleted_is_no_longer_in_the_file(store: PromptStore, path: Path) -> None:
    kept(store, "a very secret text")
    assert b"very secret" in b"".join(each.read_bytes() for each in path.parent.iterdir())
    store.delete("a")
    assert b"very secret" not in b"".join(each.read_bytes() for each in path.parent.iterdir())


def test_forgetting_runs_and_the_limits_of_runs_leave_prompts(store: PromptStore, path: Path) -> None:
    kept(store, "one")
    use(path, 1, 1.0)
    RunStore(path).forget()
    use(path, 1, 1.0)
    RunStore(path).add([], Limits(max_days=1, max_mb=1))
    (listed,) = store.select()
    assert (listed.prompt.source, listed.num_runs) == ("one", 0)


def test_reading_makes_no_file_and_only_its_owner_can_read_it(store: PromptStore, path: Path) -> None:
    assert store.select() == []
    assert store.find("a") is None
    assert store.delete("a") == 0
    assert store.next_version("a") == 1
    assert not path.parent.exists()
    kept(store, "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_several_kernels_at_once_lose_nothing_and_share_no_number(path: Path) -> None:
    found: list[int] = []

    def write(writer: int) -> None:
        found.extend(kept(PromptStore(path), f"text {writer} {index}") for index in range(10))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 41))
    assert len(PromptStore(path).select()) == 40


def test_all_prompts_of_one_call_are_kept_or_none(store: PromptStore, path: Path) -> None:
    kept(store, "one")
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON prompts WHEN new.name = 'c' BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
    connection.close()
    with pytest.raises(NBEngineError, match=r"the prompts in .* cannot be kept: full"):
        store.keep([Prompt("b", "two"), Prompt("c", "three")])
    assert [each.prompt.name for each in store.select()] == ["a"]


def test_a_store_without_prompts_gets_them_and_keeps_its_runs(path: Path) -> None:
    path.parent.mkdir(0o700, parents=True)
    with sqlite3.connect(path) as connection:
        connection.executescript(FIRST_VERSION.read_text())
    connection.close()
    store = PromptStore(path)
    assert store.select() == []
    assert kept(store, "one") == 1
    rows = RunStore(path).select(RunFilter())
    assert [(row["prompt_name"], row["prompt_version"], row["prompt_values"]) for row in rows] == [
        ("", None, {})
    ] * 2


def test_the_store_of_a_newer_version_is_left_alone(path: Path) -> None:
    newer = RunStore(path, (*STEPS, ("ALTER TABLE prompts ADD COLUMN colour TEXT",)))
    newer.add([], NO_LIMITS)
    store = PromptStore(path)
    with pytest.raises(
        NBEngineError, match=r"the prompts in .* cannot be kept: a newer nbengine has written them"
    ):
        kept(store, "one")
    with pytest.raises(NBEngineError, match="cannot be read: a newer nbengine"):
        store.find("a")


def test_python_finds_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBENGINE_RUNS_DIR", str(path.parent))
    prompts = nbengine.prompts()
    with pytest.raises(InvalidArgumentError, match=r"none is kept yet"):
        prompts["capital"]
    store = PromptStore(path)
    kept(store, "Capital of {country}?", "capital")
    kept(store, "Capital of {land}?", "capital")
    assert prompts["capital"].messages(land="Peru") == [{"role": "user", "content": "Capital of Peru?"}]
    assert prompts["capital:1"].text(country="Peru") == "Capital of Peru?"
    assert [
        (row["name"], row["version"], row["current"], row["variables"], row["text"]) for row in prompts.rows()
    ] == [
        ("capital", 1, False, ["country"], "Capital of {country}?"),
        ("capital", 2, True, ["land"], "Capital of {land}?"),
    ]
    assert ([prompt.version for prompt in prompts], len(prompts)) == ([2], 1)
    with pytest.raises(InvalidArgumentError, match=r"a version that is kept: capital has 1, 2"):
        prompts["capital:3"]
    with pytest.raises(InvalidArgumentError, match=r"did you mean capital\?"):
        prompts["capitol"]
    with pytest.raises(InvalidTypeError):
        prompts[1]  # type: ignore[index]
