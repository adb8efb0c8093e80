"""`%engine start` where engines run already: what does for it is joined, what differs or is somebody else's is named."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.config import EngineArgs, EngineConfig
from nbengine.magics.engines import launching
from nbengine.magics.engines.arguments import StartOptions
from nbengine.magics.engines.rejoin import Running, differences, engine_to_join
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.directories import MARKER
from tests.unit.magics.conftest import FakeBackend

Capture = pytest.CaptureFixture[str]


def config_of(**arguments: Any) -> EngineConfig:
    return EngineArgs.from_kwargs({"model": "random-tiny", **arguments}).create_engine_config(bound=False)


def engine(name: str, tmp_path: Path, **arguments: Any) -> ConnectionInfo:
    run_dir = tmp_path / name
    run_dir.mkdir()
    (run_dir / MARKER).touch()
    return ConnectionInfo(
        name=name,
        run_dir=str(run_dir),
        log_path="",
        host_pid=os.getpid(),
        host_started=1,
        config=config_of(**arguments),
    )


def choice(
    *,
    attached: tuple[ConnectionInfo, ...] = (),
    own: tuple[ConnectionInfo, ...] = (),
    others: tuple[ConnectionInfo, ...] = (),
    used: tuple[str, ...] = (),
    name: str | None = None,
    new: bool = False,
    **arguments: Any,
) -> str | None:
    """The name of the engine that is joined, None if one is started, or the first words of a refusal."""
    running = Running(attached, own, others, lambda info: int(info.name in used))
    try:
        found = engine_to_join(StartOptions(name, new=new), config_of(**arguments), running)
    except UsageError as refusal:
        return f"refused: {refusal}"
    return None if found is None else found.name


def test_what_is_the_same_is_joined_if_nobody_else_uses_it(tmp_path: Path) -> None:
    a, b = engine("a", tmp_path), engine("b", tmp_path)
    assert choice() is None
    assert choice(others=(a, b)) == "b"
    assert choice(others=(a, b), used=("b",)) == "a"
    assert choice(others=(a, b), new=True) is None
    assert choice(others=(a, b), keep_alive=7.0) == "b"
    refusal = choice(others=(a,), used=("a",))
    assert refusal is not None
    assert "another notebook uses it: `%engine attach a` joins it; `%engine start --new`" in refusal


def test_the_notebooks_own_engine_comes_first_when_others_use_it_too(tmp_path: Path) -> None:
    """A kernel that was killed and has come back may still be counted."""
    a, b, c = (engine(name, tmp_path) for name in "abc")
    assert choice(own=(a,), others=(b,), used=("a", "b")) == "a"
    assert choice(own=(a, b), others=(c,)) == "b"
    assert choice(attached=(c,), own=(a,)) == "c"


def test_what_differs_is_joined_by_nobody_and_stands_in_its_own_notebooks_way(tmp_path: Path) -> None:
    small = engine("small", tmp_path, max_model_len=64, seed=3)
    assert choice(others=(small,)) is None
    for place in ("attached", "own"):
        refusal = choice(**{place: (small,)})  # type: ignore[arg-type]
        assert refusal is not None
        assert "max_model_len is 64 there, not given here; seed is 3 there, 0 here" in refusal
        assert "`%engine load random-tiny …` replaces it, `%engine stop small` ends it" in refusal
        assert ("`%engine attach small`, and then" in refusal) is (place == "own")
    assert choice(own=(small,), new=True) is None
    assert choice(own=(small,), name="beside") is None
    assert choice(own=(small, engine("same", tmp_path))) == "same"


def test_a_name_is_of_one_engine_whatever_else_would_do(tmp_path: Path) -> None:
    a, b = engine("a", tmp_path), engine("b", tmp_path, seed=1)
    assert choice(others=(a, b), name="a") == "a"
    assert choice(others=(a, b), name="c") is None
    refusal = choice(others=(a, b), name="b")
    assert refusal is not None
    assert refusal.startswith("refused: engine 'b' is running already, and differs: seed is 1 there, 0 here")
    assert "another notebook uses it" in str(choice(others=(a,), name="a", used=("a",)))


def test_the_engine_of_a_program_is_left_to_it(tmp_path: Path) -> None:
    bound = engine("bound", tmp_path)
    bound.config = replace(bound.config, bound=True)
    assert choice(others=(bound,)) is None
    assert "belongs to another program" in str(choice(others=(bound,), name="bound"))


def test_many_differences_are_counted(tmp_path: Path) -> None:
    other = engine(
        "other", tmp_path, seed=1, block_size=32, max_num_seqs=3, max_model_len=9, stream_interval=2
    )
    other.config = replace(other.config, model=replace(other.config.model, model="another"))
    refusal = str(choice(own=(other,)))
    assert "differs: model is another there, random-tiny here; " in refusal
    assert "; and 2 more. " in refusal


def test_a_model_of_ones_own_is_known_by_its_files_and_by_when_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    weights = directory / "model.safetensors"
    weights.touch()
    info = engine("e", tmp_path)
    model = replace(info.config.model, model="mine", directory=str(directory), weights=(str(weights),))
    info.config = replace(info.config, model=model)
    os.utime(weights, (1, 1))
    monkeypatch.chdir(tmp_path)
    for called in ("mine", str(directory), "./mine/"):
        assert differences(info, config_of(model=called)) == []
    os.utime(weights)
    os.utime(Path(info.run_dir, MARKER), (1, 1))
    assert differences(info, config_of(model="mine")) == [
        "the model's files have changed since it was started"
    ]
    # Another directory of that name.
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    (found,) = differences(info, config_of(model="mine"))
    assert re.fullmatch(r"model is mine there, /.*/elsewhere/mine here", found)


def test_a_start_that_is_run_again_says_so_in_a_line_and_binds_its_variable(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny -o llm").raise_error()
    capsys.readouterr()
    del shell.user_ns["llm"]
    shell.run_cell("%engine start random-tiny -o llm").raise_error()
    said = capsys.readouterr().out
    assert said == (
        "engine 'random-tiny' runs already, with these arguments; `%engine start --new` starts another\n"
    )
    assert shell.user_ns["llm"] is backend.clients["random-tiny"]
    assert len(backend.started) == 1
    assert backend.attached == []


def test_an_engine_that_was_left_is_joined_and_another_notebooks_is_not(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.run_cell("%engine start random-tiny --seed 3").raise_error()
    shell.run_cell("%engine detach").raise_error()
    capsys.readouterr()
    monkeypatch.setattr(launching, "count_clients", lambda info: 1)
    assert isinstance(shell.run_cell("%engine start random-tiny --seed 3").error_in_exec, UsageError)
    assert "`%engine attach random-tiny` joins it" in capsys.readouterr().err
    monkeypatch.setattr(launching, "count_clients", lambda info: 0)
    shell.run_cell("%engine start random-tiny --seed 3").raise_error()
    assert backend.attached == ["random-tiny"]
    assert "engine 'random-tiny' runs already, with these arguments" in capsys.readouterr().out
    shell.run_cell("%generate hi").raise_error()


def test_an_engine_that_nobody_uses_is_named_where_another_one_is_started(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.run_cell("%engine start random-tiny --seed 3 --name left").raise_error()
    shell.run_cell("%engine detach").raise_error()
    capsys.readouterr()
    shell.run_cell("%engine start random-tiny").raise_error()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "nobody uses it" in line]
    assert re.fullmatch(
        r"\[engine 'left' holds .* of memory, and nobody uses it: seed is 3 there, 0 here\. `%engine attach left`, and then "
        r"`%engine load random-tiny …` replaces it, `%engine stop left` ends it\]",
        line,
    )
    assert len(backend.started) == 2
    for name, flags, num_clients in (("b", "--new", 0), ("c", "--seed 4", 1)):
        monkeypatch.setattr(launching, "count_clients", lambda info, number=num_clients: number)
        shell.run_cell("%engine detach").raise_error()
        shell.run_cell(f"%engine start random-tiny --name {name} {flags}").raise_error()
        assert "nobody uses it" not in capsys.readouterr().out


def test_the_number_of_engine_cores_is_what_it_is_by_now(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny").raise_error()
    shell.run_cell("%engine scale --dp 2").raise_error()
    capsys.readouterr()
    assert isinstance(shell.run_cell("%engine start random-tiny").error_in_exec, UsageError)
    assert "data_parallel_size is 2 there, 1 here" in capsys.readouterr().err
    shell.run_cell("%engine start random-tiny --dp 2").raise_error()
    assert len(backend.started) == 1


def test_a_file_of_another_engine_is_not_read_for_it(tmp_path: Path) -> None:
    info = engine("a", tmp_path)
    assert differences(msgspec.structs.replace(info, name="no-such-engine"), config_of()) == []
