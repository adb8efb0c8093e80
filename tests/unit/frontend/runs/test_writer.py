"""Runs are written while nothing waits for them, and trouble is told once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
from runs_made import made_run

import nbengine
from nbengine.errors import InvalidArgumentError, NBEngineError, NotSupportedError
from nbengine.frontend.runs import kept, writer
from nbengine.frontend.runs.run import FoundScores, KeptRun, Limits, Run, RunFilter
from nbengine.frontend.runs.store import RunStore
from nbengine.frontend.runs.writer import RunWriter

LIMITS = Limits()


class HeldStore(RunStore):
    """A store whose disk takes nothing until it is released."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.released = threading.Event()
        self.begun = threading.Event()

    def add(self, runs: Sequence[Run], limits: Limits) -> list[int]:
        self.begun.set()
        assert self.released.wait(60)
        return super().add(runs, limits)


def test_keeping_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    store = HeldStore(tmp_path / "runs.sqlite")
    kept_by = RunWriter(store)
    kept = [kept_by.keep(made_run(prompt=str(number)), LIMITS) for number in range(1200)]
    assert kept[0].number is None
    assert store.begun.wait(60)
    assert not kept_by.flush(0.0)
    store.released.set()
    assert kept_by.flush()
    assert [row["prompt"] for row in store.select(RunFilter())] == list(map(str, range(1200)))
    assert [each.number for each in kept] == list(range(1, 1201))
    assert kept_by.take_trouble() == ""


def test_scores_are_written_behind_their_runs_and_the_last_ones_stay(tmp_path: Path) -> None:
    store = HeldStore(tmp_path / "runs.sqlite")
    kept_by = RunWriter(store)
    kept = [kept_by.keep(made_run(), LIMITS) for _ in range(3)]
    for number, each in enumerate(kept[:2]):
        kept_by.score(each, FoundScores({"score": -1}, {}))
        kept_by.score(each, FoundScores({"score": number}, {"question": "4"}))
    # One that nobody has kept.
    kept_by.score(KeptRun(), FoundScores({"score": 9}, {}))
    store.released.set()
    assert kept_by.flush()
    assert [row["scores"] for row in store.select(RunFilter())] == [{"score": 0}, {"score": 1}, {}]
    kept_by.score(kept[2], FoundScores({"score": 2}, {}))
    assert kept_by.flush()
    assert store.get(3)["score"] == 2
    store.path.write_text("something else " * 100)
    kept_by.score(kept[2], FoundScores({"score": 3}, {}))
    assert kept_by.flush()
    assert kept_by.take_trouble().startswith("scores of runs are not kept: the runs in ")


def test_a_disk_that_takes_nothing_for_long_costs_a_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MOST_WAITING", 3)
    store = HeldStore(tmp_path / "runs.sqlite")
    kept_by = RunWriter(store)
    kept_by.keep(made_run(prompt="first"), LIMITS)
    assert store.begun.wait(60)
    for number in range(5):
        kept_by.keep(made_run(prompt=str(number)), LIMITS)
    assert kept_by.take_trouble() == "2 runs are not kept: the disk takes too long"
    store.released.set()
    kept_by.flush()
    assert [row["prompt"] for row in store.select(RunFilter())] == ["first", "0", "1", "2"]


def test_trouble_is_told_once_until_runs_are_kept_again(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text("a file")
    kept_by = RunWriter(RunStore(place / "runs.sqlite"))
    kept_by.score(kept_by.keep(made_run(), LIMITS), FoundScores({"lost": "with its run"}, {}))
    kept_by.flush()
    assert kept_by.take_trouble().startswith("a run is not kept: the runs in ")
    for _ in range(2):
        kept_by.keep(made_run(), LIMITS)
        kept_by.flush()
        assert kept_by.take_trouble() == ""
    place.unlink()
    kept_by.keep(made_run(prompt="goes on"), LIMITS)
    kept_by.flush()
    assert [row["prompt"] for row in kept_by.store.select(RunFilter())] == ["goes on"]
    (place / "runs.sqlite").unlink()
    (place / "runs.sqlite").mkdir()
    kept_by.keep(made_run(), LIMITS)
    kept_by.flush()
    assert kept_by.take_trouble().startswith("a run is not kept: ")


def test_an_error_that_nobody_expects_ends_the_thread_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))

    class Broken(RunStore):
        def add(self, runs: Sequence[Run], limits: Limits) -> list[int]:
            raise ZeroDivisionError("by nothing")

    kept_by = RunWriter(Broken(tmp_path / "runs.sqlite"))
    for _ in range(2):
        kept_by.keep(made_run(), LIMITS)
        assert kept_by.flush()
    assert kept_by.take_trouble() == "2 runs are not kept: ZeroDivisionError: by nothing"
    assert set(raised) <= {ZeroDivisionError}


def test_where_no_thread_can_start_runs_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    kept_by = RunWriter(RunStore(tmp_path / "runs.sqlite"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    kept_by.keep(made_run(prompt="late"), LIMITS)
    assert [row["prompt"] for row in kept_by.store.select(RunFilter())] == ["late"]
    assert kept_by.flush(0.0)


EXITS = """
import os, sys, threading
from nbengine.frontend.runs.run import Limits
from nbengine.frontend.runs.store import RunStore
from nbengine.frontend.runs.writer import RunWriter
from pathlib import Path
from runs_made import made_run
writer = RunWriter(RunStore(Path(sys.argv[1])))
if sys.argv[2] == "late":
    import atexit
    atexit.register(lambda: writer.keep(made_run(prompt="late"), Limits()))
else:
    for number in range(50):
        writer.keep(made_run(prompt=str(number)), Limits())
if sys.argv[2] == "fork":
    writer.flush()
    child = os.fork()
    writer.keep(made_run(prompt=f"child {child == 0}"), Limits())
    assert writer.flush() and writer.take_trouble() == ""
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("exit", list(map(str, range(50)))),
        ("late", ["late"]),
        ("fork", [*map(str, range(50)), "child False"]),
    ],
)
def test_what_waits_is_written_when_the_interpreter_ends_and_a_forked_child_writes_nothing(
    tmp_path: Path, how: str, expected: list[str]
) -> None:
    path = tmp_path / "runs.sqlite"
    support = str(Path(__file__).parents[3] / "support")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", EXITS, str(path), how], check=True, timeout=60, env=environment)
    assert [row["prompt"] for row in RunStore(path).select(RunFilter())] == expected


@pytest.fixture
def some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """A store at the place that the environment names, with three runs."""
    monkeypatch.setenv("NBENGINE_RUNS_DIR", str(tmp_path / "runs"))
    store = RunStore(tmp_path / "runs" / "runs.sqlite")
    store.add([made_run(prompt=prompt) for prompt in ("one", "two", "three")], LIMITS)
    return store


def test_runs_are_read_from_python(some: RunStore) -> None:
    found = nbengine.runs()
    assert [row["prompt"] for row in found.rows()] == ["one", "two", "three"]
    assert [row["run"] for row in found] == [1, 2, 3]
    assert len(found) == 3
    assert found[2] == found.rows()[1]
    assert repr(found) == f"Runs(3 in {str(some.path)!r})"
    assert [row["prompt"] for row in nbengine.runs(find="T", last=1)] == ["three"]
    some.change(1, pinned=True)
    assert [row["run"] for row in nbengine.runs(pinned=True)] == [1]
    assert {"run", "time", "engine", "model", "prompt", "text", "metrics"} <= set(found[1])
    with pytest.raises(InvalidArgumentError, match="run must be the number of a kept run"):
        found[9]
    with pytest.raises(InvalidArgumentError, match="last must be"):
        nbengine.runs(last=0)


def test_what_this_process_has_asked_is_read_with_it(some: RunStore) -> None:
    RunWriter(some).keep(made_run(prompt="just now"), LIMITS)
    assert kept.runs(last=1).rows()[0]["prompt"] == "just now"


def test_a_frame_needs_pandas_and_rows_do_not(some: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NotSupportedError, match=r"to_frame\(\) needs pandas.*\.rows\(\)"):
        nbengine.runs().to_frame()
    fake = types.ModuleType("pandas")
    fake.DataFrame = lambda rows: ("frame", rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert nbengine.runs().to_frame() == ("frame", nbengine.runs().rows())


def test_reading_in_a_script_takes_the_default_profile(tmp_path: Path) -> None:
    path = tmp_path / "ipython" / "profile_default" / "nbengine" / "runs.sqlite"
    RunStore(path).add([made_run()], LIMITS)
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    code = "import nbengine, sys; print(len(nbengine.runs()), sorted({'torch', 'pandas'} & {*sys.modules}))"
    shown = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60, env=environment)
    assert shown == "1 []\n"


def test_a_store_that_cannot_be_read_is_an_error_that_says_so(some: RunStore) -> None:
    some.path.write_text("something else " * 100)
    with pytest.raises(NBEngineError, match="cannot be read: file is not a database"):
        nbengine.runs().rows()
