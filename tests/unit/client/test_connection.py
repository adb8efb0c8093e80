"""Connection files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nbengine.client.connection import ConnectionInfo, read_connection
from nbengine.config import EngineConfig, ModelConfig
from nbengine.ipc.messages import EngineReady, WorkerInfo


@pytest.fixture
def info() -> ConnectionInfo:
    workers = [WorkerInfo(rank, rank, 0, 40 + rank, "cpu", 3, 5, 0, 2) for rank in range(2)]
    ready = EngineReady(0, 64, 16, 100, 10, 6, "cpu", "float32", ["generate"], 39, workers)
    return ConnectionInfo(
        name="e",
        run_dir="/nowhere",
        log_path="/nowhere/e.log",
        host_pid=1,
        host_create_time=2.0,
        config=EngineConfig(ModelConfig("m")),
        ready=[ready],
    )


def test_the_workers_come_back_as_they_were_written(tmp_path: Path, info: ConnectionInfo) -> None:
    (tmp_path / "e.json").write_bytes(msgspec.json.encode(info))
    assert read_connection(tmp_path / "e.json") == info


def test_a_file_from_before_there_were_workers_can_be_read(tmp_path: Path, info: ConnectionInfo) -> None:
    old = msgspec.json.decode(msgspec.json.encode(info))
    del old["ready"][0]["workers"]
    (tmp_path / "e.json").write_bytes(msgspec.json.encode(old))
    assert read_connection(tmp_path / "e.json").ready[0].workers == []
