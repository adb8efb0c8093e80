"""Connection files."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import EngineReady, WorkerInfo
from nbengine.ipc.curve import make_curve_keys
from nbengine.ipc.liveness import machine_id
from nbengine.runtime.connection import (
    ConnectionInfo,
    engine_file,
    read_connection,
    remove_engine_files,
    write_engine_file,
)
from nbengine.runtime.directories import EngineDirectories


@pytest.fixture
def info() -> ConnectionInfo:
    workers = [WorkerInfo(rank, rank, 0, 40 + rank, "cpu", 3, 5, 0, 2) for rank in range(2)]
    ready = EngineReady(0, 64, 16, 100, 10, 6, "cpu", "float32", ["generate"], 39, workers)
    return ConnectionInfo(
        name="e",
        run_dir="/nowhere",
        log_path="/nowhere/e.log",
        host_pid=1,
        host_started=2,
        config=EngineConfig(ModelConfig("m")),
        ready=[ready],
    )


def test_the_workers_come_back_as_they_were_written(tmp_path: Path, info: ConnectionInfo) -> None:
    (tmp_path / "e.json").write_bytes(msgspec.json.encode(info))
    assert read_connection(tmp_path / "e.json") == info


def test_a_file_from_before_there_were_workers_can_be_read(tmp_path: Path, info: ConnectionInfo) -> None:
    old = msgspec.json.decode(msgspec.json.encode(info))
    del old["cores"][0]["workers"]
    (tmp_path / "e.json").write_bytes(msgspec.json.encode(old))
    assert read_connection(tmp_path / "e.json").ready[0].workers == []


@pytest.fixture
def networked(info: ConnectionInfo, tmp_path: Path) -> ConnectionInfo:
    config = EngineConfig(ModelConfig("m"), parallel=ParallelConfig(data_parallel_address="127.0.0.1"))
    return msgspec.structs.replace(info, config=config, keys=make_curve_keys(), run_dir=str(tmp_path))


def test_an_engine_of_one_machine_has_its_sockets_in_its_run_directory(info: ConnectionInfo) -> None:
    assert info.address("host.sock") == info.host_bind_address("host.sock") == "ipc:///nowhere/host.sock"
    assert info.client_bind_address("c-1.in") == "ipc:///nowhere/c-1.in"


def test_an_engine_on_a_network_has_the_addresses_that_its_host_has_noted(networked: ConnectionInfo) -> None:
    assert networked.host_bind_address("host.sock") == "tcp://127.0.0.1:*"
    with pytest.raises(NBEngineError, match=r"does not listen on its host\.sock yet"):
        networked.address("host.sock")
    networked.addresses = {"host.sock": "tcp://127.0.0.1:7"}
    assert networked.address("host.sock") == "tcp://127.0.0.1:7"
    assert networked.client_bind_address("c-1.in") == "tcp://127.0.0.1:*"


def test_the_keys_are_written_for_the_owner_alone_and_read_from_nothing_else(
    networked: ConnectionInfo,
) -> None:
    write_engine_file(networked)
    path = engine_file(networked.run_dir)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_connection(path) == networked
    path.chmod(0o640)
    with pytest.raises(NBEngineError, match="must be its owner's alone"):
        read_connection(path)


def test_nothing_of_an_engine_elsewhere_is_removed_or_taken_for_dead(networked: ConnectionInfo) -> None:
    own = EngineDirectories.make()
    networked = msgspec.structs.replace(
        networked, run_dir=own.run_dir, tensor_dir=own.tensor_dir, marker=own.marker
    )
    write_engine_file(networked)
    elsewhere = msgspec.structs.replace(networked, machine="elsewhere", host_pid=0)
    assert not elsewhere.is_here
    assert elsewhere.host_alive
    remove_engine_files(elsewhere)
    assert engine_file(networked.run_dir).exists()
    here = msgspec.structs.replace(networked, machine=machine_id())
    assert here.is_here
    remove_engine_files(here)
    assert not engine_file(networked.run_dir).exists()
