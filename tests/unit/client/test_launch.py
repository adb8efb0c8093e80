"""Names, files and environment of an engine that is to be started; no process is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from nbengine.client.engines import command, launch
from nbengine.client.engines.directory import find_engine
from nbengine.client.engines.logs import find_log, find_worker_log, follow_log
from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError, InvalidArgumentError, NBEngineError
from nbengine.ipc.liveness import this_process
from nbengine.runtime.connection import ConnectionInfo, connection_file, log_dir, write_connection
from nbengine.runtime.directories import EngineDirectories
from nbengine.runtime.logs import worker_log_path


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")


def running_engine(name: str) -> ConnectionInfo:
    """A connection file whose host is this very process."""
    host = this_process()
    info = ConnectionInfo(
        name=name,
        run_dir="/tmp/nbe-none",
        log_path=str(log_dir() / f"{name}.log"),
        host_pid=host.pid,
        host_started=host.started,
        config=EngineConfig(),
    )
    write_connection(info)
    return info


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("/models/My Model/", "my-model"),
        ("~/x/Model.Q4_1.gguf", "model.q4_1"),
        ("///", "engine"),
        ("é", "engine"),
        ("a" * 99, "a" * 48),
    ],
)
def test_an_engine_is_named_after_its_model(model: str, name: str) -> None:
    assert launch.slug(model) == name


def test_names_of_running_engines_are_numbered_past() -> None:
    assert launch._choose_name(None, "some/Model") == "model"
    running_engine("model")
    assert launch._choose_name(None, "some/Model") == "model-2"
    running_engine("model-2")
    assert launch._choose_name(None, "some/Model") == "model-3"


def test_a_name_that_is_taken_is_refused() -> None:
    running_engine("mine")
    with pytest.raises(InvalidArgumentError, match="'mine'"):
        launch._choose_name("mine", "x")


@pytest.mark.parametrize("name", ["", "../x", "a b", "-a", "x" * 65, ".hidden"])
def test_a_name_is_safe_in_a_path(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="name must be"):
        launch._choose_name(name, "x")


def test_the_name_of_a_dead_engine_is_free_and_its_files_are_removed() -> None:
    own = EngineDirectories.make()
    dead = {"run_dir": own.run_dir, "tensor_dir": own.tensor_dir, "marker": own.marker}
    info = msgspec.structs.replace(running_engine("dead"), host_started=1, **dead)
    write_connection(info)
    assert launch._choose_name("dead", "x") == "dead"
    assert not any(map(os.path.exists, own.paths))
    assert not connection_file("dead").exists()


def test_a_file_that_is_no_connection_file_takes_no_name() -> None:
    connection_file("odd").write_text("{")
    assert launch._choose_name("odd", "x") == "odd"


def test_old_logs_go_and_those_of_running_engines_stay() -> None:
    kept = Path(running_engine("old").log_path)
    kept.touch()
    os.utime(kept, (1, 1))
    others = [log_dir() / f"e{index}-20260101-000000-1.log" for index in range(30)]
    now = time.time()
    for age, path in enumerate(others):
        path.touch()
        os.utime(path, (now - age, now - age))
    created = launch._new_log_file("new")
    remaining = set(log_dir().glob("*.log"))
    assert {kept, created, others[0]} <= remaining
    assert others[-1] not in remaining
    assert len(remaining - {kept}) == launch.KEPT_LOGS
    assert created.stat().st_mode & 0o777 == 0o600


def test_logs_of_workers_go_with_the_log_of_their_engine() -> None:
    running = Path(running_engine("old").log_path)
    os.utime(worker_log(running, 3), (1, 1))
    engines = [log_dir() / f"e{index}-20260101-000000-1.log" for index in range(30)]
    now = time.time()
    for age, path in enumerate(engines):
        path.touch()
        os.utime(path, (now - age, now - age))
        for rank in (0, 11):
            worker_log(path, rank)
    named_like_one = log_dir() / "x.rank0-20260101-000000-1.log"
    named_like_one.touch()
    launch._new_log_file("new")
    logs = set(log_dir().glob("*.log"))
    assert named_like_one in logs
    assert worker_log_path(running, 3) in logs
    left = [path for path in engines if path in logs]
    assert left == engines[: launch.KEPT_LOGS - 2]
    ranks = {path for path in logs if ".rank" in path.name} - {named_like_one, worker_log_path(running, 3)}
    assert ranks == {worker_log_path(path, rank) for path in left for rank in (0, 11)}


def test_the_log_of_a_worker_is_found_by_its_rank() -> None:
    path = launch._new_log_file("e")
    for rank in (0, 1, 10):
        worker_log(path, rank)
    worker_log(launch._new_log_file("e-2"), 2)
    assert find_worker_log(path, 10) == worker_log_path(path, 10)
    for rank in (-1, 2, 11):
        with pytest.raises(InvalidArgumentError, match=f"rank must be one of 0, 1, 10, got {rank}"):
            find_worker_log(path, rank)
    assert find_log("e")[0] == path


def test_a_worker_inside_the_engine_core_writes_to_the_engines_log() -> None:
    path = launch._new_log_file("e")
    assert find_worker_log(path, 0) == path
    with pytest.raises(InvalidArgumentError, match="rank must be 0, got 1"):
        find_worker_log(path, 1)


def worker_log(engine_log: Path, rank: int) -> Path:
    path = worker_log_path(engine_log, rank)
    path.touch()
    return path


def test_engines_of_one_name_have_a_log_each() -> None:
    assert len({launch._new_log_file("e") for _ in range(5)}) == 5
    path, _ = find_log("e")
    assert path in log_dir().glob("e-*.log")


def test_a_host_that_cannot_be_started_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    socket_dir = tmp_path / "s"
    socket_dir.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(EngineStartError, match="cannot be started"):
        launch.launch_engine(EngineConfig(), name="never")
    assert list(socket_dir.iterdir()) == []
    assert not connection_file("never").exists()
    assert launch._children == {}


def test_the_child_finds_this_package_also_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "PYTHONPATH" not in command.host_environment()

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    monkeypatch.setenv("PYTHONPATH", "/x")
    path = command.host_environment()["PYTHONPATH"].split(os.pathsep)
    assert (Path(path[0]) / "nbengine" / "__init__.py").is_file()
    assert path[1:] == ["/x"]


def test_an_unknown_engine_is_answered_with_those_that_run() -> None:
    running_engine("alpha")
    with pytest.raises(NBEngineError, match="no engine is called 'beta'; running: alpha"):
        find_engine("beta")
    assert find_engine("alpha").name == "alpha"
    assert find_engine(connection_file("alpha")).name == "alpha"


def test_a_dead_engine_is_not_found() -> None:
    write_connection(msgspec.structs.replace(running_engine("gone"), host_started=1))
    with pytest.raises(NBEngineError, match="gone is dead"):
        find_engine("gone")


def test_the_log_of_an_engine_that_has_ended_is_found_by_name() -> None:
    for name in ("e-20260101-000000-1.log", "e-20260102-000000-1.log", "e-2-20260103-000000-1.log"):
        (log_dir() / name).write_text(name)
    os.utime(log_dir() / "e-20260101-000000-1.log", (1, 1))
    path, info = find_log("e")
    assert path.name == "e-20260102-000000-1.log"
    assert info is None
    assert list(follow_log(path, info, len(path.name))) == []
    with pytest.raises(NBEngineError, match="has left a log"):
        find_log("f")
