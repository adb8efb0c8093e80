"""No process that an engine core has started outlives the core, whether it is killed or let go."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from engine_processes import is_running
from process_support.engine_under_test import wait_for

from nbengine.config import EngineConfig
from nbengine.engine.host import launchers
from nbengine.engine.host.launchers import LocalCore, core_launcher
from nbengine.runtime.connection import ConnectionInfo

pytestmark = pytest.mark.fresh_processes

CORE = """
import subprocess, sys, time
subprocess.Popen(["sleep", "1000"])
time.sleep(1000)
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], LocalCore]:
    """Start a core with a child that notices nothing."""
    monkeypatch.setattr(launchers, "engine_command", lambda *_: [sys.executable, "-c", CORE])
    info = ConnectionInfo(
        name="e",
        run_dir=str(tmp_path),
        log_path=str(tmp_path / "log"),
        host_pid=0,
        host_started=0,
        config=EngineConfig(),
    )

    def start() -> LocalCore:
        core = core_launcher(info, lambda: None).start(3, 7)
        assert isinstance(core, LocalCore)
        return core

    return start


def child_of(core: LocalCore) -> psutil.Process:
    process = psutil.Process(core.pid)
    wait_for(process.children, "the child")
    return process.children()[0]


def test_what_a_killed_core_has_started_dies_with_it(start: Callable[[], LocalCore]) -> None:
    with contextlib.closing(start()) as core:
        child = child_of(core)
        assert (core.rank, core.incarnation, core.poll()) == (3, 7, None)
        os.kill(core.pid, signal.SIGKILL)
        wait_for(lambda: core.poll() is not None, "the end of the core")
        assert core.poll() == -signal.SIGKILL
        wait_for(lambda: not is_running(child), "the end of its child")


def test_a_core_that_is_let_go_ends_with_all_that_it_has_started(start: Callable[[], LocalCore]) -> None:
    core = start()
    child, pid = child_of(core), core.pid
    with pytest.raises(TimeoutError, match=r"engine core 3 has not ended within 0\.01 s"):
        core.wait(0.01)
    core.close()
    core.wait(60)
    wait_for(lambda: not is_running(child), "the end of its child")
    assert not psutil.pid_exists(pid)
