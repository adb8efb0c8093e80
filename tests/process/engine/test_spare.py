"""A spare engine becomes the next one that is started, and nothing of it outlives its need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from process_support.engine_under_test import SUPPORT_PATH, fake_config, wait_for

from nbengine.client.engines import spare
from nbengine.client.engines.launch import bury_child, launch_engine
from nbengine.config import ParallelConfig
from nbengine.runtime.connection import ConnectionInfo, connection_file, read_connection

pytestmark = pytest.mark.fresh_processes

IMPORTS = 30.0
"""Seconds in which a spare core has imported torch, on a machine that does much else."""
OWNER = """
import sys
from nbengine.client.engines import spare
spare.keep_spare()
print(spare._spare.process.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def support_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Engines with the fake executor need no torch, and to import it would take longer than most tests here."""
    (tmp_path / "left_out").mkdir()
    (tmp_path / "left_out" / "torch.py").write_text("raise ImportError('left out')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'left_out'}{os.pathsep}{SUPPORT_PATH}")
    yield
    spare.drop_spare()


@pytest.fixture
def with_torch(support_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let spare cores import all that they do elsewhere."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH)


def kept_spare() -> tuple[psutil.Process, psutil.Process]:
    """A spare host, and its core that has begun."""
    spare.keep_spare()
    assert spare._spare is not None
    host = psutil.Process(spare._spare.process.process.pid)
    wait_for(host.children, "a spare core")
    return host, host.children()[0]


def wait_until_ready(info: ConnectionInfo) -> ConnectionInfo:
    path = connection_file(info.name)
    wait_for(lambda: path.exists() and read_connection(path).ready, "an engine that takes requests", IMPORTS)
    return read_connection(path)


def end(info: ConnectionInfo) -> None:
    os.kill(info.host_pid, signal.SIGTERM)
    wait_for(lambda: not info.host_alive, "the end of the host")
    bury_child(info.run_dir)
    assert not Path(info.run_dir).exists()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("bound", [False, True])
def test_its_processes_become_the_engine_which_logs_and_ends_like_any_other(bound: bool) -> None:
    host, core = kept_spare()
    info = wait_until_ready(launch_engine(fake_config(bound=bound)))
    assert info.host_pid == host.pid
    assert [child.pid for child in host.children()] == [core.pid]
    assert spare._spare is None
    names = [process.cmdline()[0] for process in (host, core)]
    assert names == [f"nbengine: host {info.name}", f"nbengine: core 0 {info.name}"]
    # The core takes requests before it says so in the log.
    end(info)
    assert is_gone(core)
    log = Path(info.log_path).read_text()
    assert "[host]" in log
    assert "[core 0] nbengine.engine.start_log: start: takes requests after" in log


@pytest.mark.usefixtures("with_torch")
def test_an_engine_that_is_ordered_at_once_starts_when_its_spare_has_imported() -> None:
    spare.keep_spare()
    info = wait_until_ready(launch_engine(fake_config()))
    assert "Traceback" not in Path(info.log_path).read_text()
    end(info)


@pytest.mark.parametrize("change", ["variable", "directory"])
def test_it_is_not_taken_where_its_surroundings_have_changed(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host, core = kept_spare()
    if change == "variable":
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
    else:
        monkeypatch.chdir(tmp_path)
    info = wait_until_ready(launch_engine(fake_config()))
    assert info.host_pid != host.pid
    wait_for(lambda: is_gone(host) and is_gone(core), "the end of the spare engine")
    end(info)


def test_an_engine_starts_though_the_spare_host_was_killed() -> None:
    host, core = kept_spare()
    host.kill()
    wait_for(lambda: is_gone(host), "the end of the spare host")
    info = wait_until_ready(launch_engine(fake_config()))
    assert info.host_pid != host.pid
    wait_for(lambda: is_gone(core), "the end of the spare core")
    end(info)


def test_an_engine_starts_though_the_spare_core_was_killed() -> None:
    host, core = kept_spare()
    core.kill()
    wait_for(lambda: is_gone(core), "the end of the spare core")
    info = wait_until_ready(launch_engine(fake_config()))
    assert info.host_pid == host.pid
    end(info)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_its_owner_dies(number: int) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        host = psutil.Process(int(owner.stdout.readline()))
        wait_for(host.children, "a spare core")
        core = host.children()[0]
        owner.send_signal(number)
    wait_for(lambda: is_gone(host) and is_gone(core), "the end of the spare engine")


def test_a_signal_ends_it_while_it_waits() -> None:
    host, core = kept_spare()
    host.send_signal(signal.SIGTERM)
    wait_for(lambda: is_gone(host) and is_gone(core), "the end of the spare engine")


def test_it_ends_when_nobody_has_needed_it_for_long_and_can_be_had_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[spare.SpareHost] = []

    def start(original: Callable[[], spare.SpareHost] = spare._start) -> spare.SpareHost:
        started.append(original())
        return started[-1]

    # By the time that it has been started it may have been forgotten.
    monkeypatch.setattr(spare, "_start", start)
    spare.keep_spare(seconds=0.1)
    (first,) = started
    wait_for(lambda: first.process.process.returncode is not None, "the end of the spare engine")
    wait_for(lambda: spare._spare is None, "that it is forgotten")
    again, _ = kept_spare()
    assert again.pid != first.process.process.pid


def test_an_engine_starts_though_the_working_directory_has_been_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host, _ = kept_spare()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    info = wait_until_ready(launch_engine(fake_config()))
    assert info.host_pid != host.pid
    end(info)


def test_a_library_that_cannot_be_imported_is_told_in_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken here')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{SUPPORT_PATH}")
    host, _ = kept_spare()
    parallel = ParallelConfig()
    info = launch_engine(fake_config(parallel=parallel))
    assert info.host_pid == host.pid
    wait_for(lambda: not info.host_alive, "the end of the host", IMPORTS)
    bury_child(info.run_dir)
    assert "torch is broken here" in Path(info.log_path).read_text()


def test_a_second_one_is_not_started() -> None:
    host, _ = kept_spare()
    assert kept_spare()[0].pid == host.pid


def test_a_fork_of_its_owner_leaves_it_to_the_owner() -> None:
    host, _ = kept_spare()
    pid = os.fork()
    if not pid:
        os._exit(0 if spare.take_spare() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert host.is_running()
    taken = spare.take_spare()
    assert taken is not None
    assert taken.process.process.pid == host.pid
    taken.process.close()
