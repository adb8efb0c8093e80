"""Whatever is passed to `nbengine.runs()` chooses runs, or is refused by the name of its argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs_made import made_run

import nbengine
from nbengine.errors import NBEngineError
from nbengine.frontend.runs.place import VARIABLE, store_path
from nbengine.frontend.runs.run import Limits
from nbengine.frontend.runs.store import RunStore
from tests.support.odd_values import ANYTHING, short_line


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Keep three runs, asked at 1, 2 and 3."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("runs")))
        runs = [made_run(time=float(number), prompt=f"prompt {number}") for number in (1, 2, 3)]
        RunStore(store_path()).add(runs, Limits(max_days=None))
        yield


@pytest.mark.parametrize("argument", ["find", "model", "engine", "since", "errors", "pinned", "last"])
@given(value=ANYTHING | st.integers() | st.floats())
def test_an_odd_value_is_taken_or_refused_by_the_name_of_its_argument(argument: str, value: Any) -> None:
    try:
        found = nbengine.runs(**{argument: value}).rows()
    except NBEngineError as error:
        said = short_line(error)
        assert argument in said
    else:
        assert all(row["prompt"].startswith("prompt ") for row in found)


@given(value=ANYTHING | st.integers())
def test_an_odd_number_of_a_run_is_refused(value: Any) -> None:
    try:
        row = nbengine.runs()[value]
    except NBEngineError as error:
        said = short_line(error)
        assert "run" in said
    else:
        assert row["run"] == value


def test_numbers_of_numpy_are_numbers() -> None:
    assert [row["run"] for row in nbengine.runs(last=np.int64(2))] == [2, 3]
    assert [row["run"] for row in nbengine.runs(since=np.float32(2.5))] == [3]
    assert nbengine.runs(pinned=np.bool_(True)).rows() == []
    assert nbengine.runs()[np.int32(2)]["prompt"] == "prompt 2"


@pytest.mark.parametrize("last", [0, -1, 1.5, True, "3", 2**63])
def test_the_number_of_runs_is_a_number(last: Any) -> None:
    with pytest.raises(
        NBEngineError, match=r"last must be (a whole number, at least 1, or None|an integer), got"
    ):
        nbengine.runs(last=last)


def test_runs_can_be_asked_where_nothing_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    assert len(nbengine.runs()) == 0
    assert not (tmp_path / "none").exists()
