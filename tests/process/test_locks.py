"""Locks on files: waited for as long as is said and no longer, and their holder is named."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbengine.client.engines import launch
from nbengine.errors import EngineStartError
from nbengine.models.checkpoints.storage import file_lock
from nbengine.runtime.connection import runtime_dir
from nbengine.runtime.locks import holder_of, take_lock

HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(600)"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(tmp_path))
    return runtime_dir() / "nbengine-launch.lock"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the lock and does not let go."""
    path.touch(0o600)
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_a_start_beside_one_that_hangs_says_who_it_is_and_what_to_do(
    holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LOCK_TIMEOUT", 0.1)
    with (
        pytest.raises(
            EngineStartError, match=rf"for 0.1 s: process {holder.pid} \(.*\) has it; .*kill {holder.pid}"
        ),
        launch._launch_lock(),
    ):
        pass
    stop(holder)
    with (
        pytest.raises(EngineStartError, match=rf"which is stopped has it; .*kill -CONT {holder.pid} or kill"),
        launch._launch_lock(),
    ):
        pass
    holder.kill()
    holder.wait()
    with launch._launch_lock():
        pass


def test_a_lock_is_taken_as_soon_as_it_is_free(path: Path, holder: subprocess.Popen[bytes]) -> None:
    with open(path, "rb") as file:
        assert not take_lock(file.fileno(), 0)
        found = holder_of(file.fileno())
        assert found is not None
        assert found.pid == holder.pid
        holder.kill()
        assert take_lock(file.fileno(), 60)
        found = holder_of(file.fileno())
        assert found is not None
        assert found.pid == os.getpid()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_fetch_goes_on_without_a_lock_that_nobody_lets_go(
    path: Path, holder: subprocess.Popen[bytes], is_stopped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[None] = []
    if is_stopped:
        stop(holder)
    start = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        file_lock(path, lambda: waits.append(None), patience=60 if is_stopped else 0.2, stopped_patience=0.1),
    ):
        assert time.monotonic() - start < 30
    assert waits == [None]
    assert f"process {holder.pid}" in caplog.text
