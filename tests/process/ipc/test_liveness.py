"""A process is known by what the kernel noted at its start: no step of the clock, no reused pid, no failure to look."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from nbengine.ipc import liveness
from nbengine.ipc.liveness import (
    ProcessIdentity,
    ProcessState,
    ProcessWatch,
    identity_of,
    is_alive,
    lasting_machine_id,
    machine_id,
    send_signal,
    state_of,
    this_process,
    was_started_again,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def known(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    found = identity_of(process.pid)
    assert found is not None
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end


@pytest.fixture
def no_descriptor_is_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[0]), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("step", [3600, 1, -1, -3600])
def test_a_step_of_the_clock_changes_nobody(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    process, watch = known(child), ProcessWatch(known(child))
    now, boot = time.time, psutil.boot_time()
    monkeypatch.setattr(time, "time", lambda: now() + step)
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot + step)
    assert identity_of(child.pid) == process
    assert is_alive(process)
    assert not watch.gone()
    watch.close()


def test_each_state_is_seen_and_a_zombie_is_gone(child: subprocess.Popen[bytes]) -> None:
    process, watch = known(child), ProcessWatch(known(child))
    assert state_of(process) is ProcessState.RUNNING
    assert send_signal(process, signal.SIGSTOP)
    wait_until(lambda: state_of(process) is ProcessState.STOPPED)
    assert is_alive(process)
    assert not watch.gone()
    assert send_signal(process, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(process) is ProcessState.GONE
    assert identity_of(child.pid) is None
    assert watch.gone()
    child.wait()
    assert not send_signal(process, signal.SIGKILL)
    watch.close()


@linux
def test_a_process_that_a_debugger_holds_is_not_stopped() -> None:
    script = (
        "import ctypes, os, signal\n"
        "ctypes.CDLL(None).ptrace(0, 0, 0, 0)\n"  # PTRACE_TRACEME
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    # The parent is the tracer. `Popen` would take each of its stops for its end.
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", script], os.environ)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        traced = identity_of(pid)
        assert traced is not None
        assert state_of(traced) is ProcessState.TRACED
    finally:
        os.kill(pid, signal.SIGKILL)
        while not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            pass


def test_a_later_process_with_the_same_pid_is_another(child: subprocess.Popen[bytes]) -> None:
    process = known(child)
    earlier = ProcessIdentity(process.pid, process.started - 1)
    watch = ProcessWatch(earlier)
    assert state_of(earlier) is ProcessState.GONE
    assert watch.gone()
    assert not send_signal(earlier, signal.SIGKILL)
    assert state_of(process) is ProcessState.RUNNING
    watch.close()


def test_without_a_start_the_pid_alone_counts(child: subprocess.Popen[bytes]) -> None:
    assert is_alive(ProcessIdentity(child.pid, 0))


@pytest.mark.parametrize("pid", [-1, 0, 2**31, 2**40, 2**63 - 1])
def test_what_is_no_pid_is_no_process(pid: int) -> None:
    nobody = ProcessIdentity(pid, 0)
    assert identity_of(pid) is None
    assert not is_alive(nobody)
    assert not send_signal(nobody, signal.SIGTERM)
    assert ProcessWatch(nobody).gone()


@linux
@pytest.mark.parametrize("name", ["a) S 1", ") (", "x y\n"])
def test_a_name_cannot_pass_for_something_else(
    child: subprocess.Popen[bytes], tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.symlink_to("/bin/sleep")
    with subprocess.Popen([path, "60"]) as named:
        try:
            wait_until(lambda: Path(f"/proc/{named.pid}/comm").read_text() == name[:15] + "\n")
            assert state_of(known(named)) is ProcessState.RUNNING
            assert known(named).started >= known(child).started
        finally:
            named.kill()


@linux
def test_a_failure_to_look_is_no_death(
    child: subprocess.Popen[bytes], request: pytest.FixtureRequest
) -> None:
    process = known(child)
    request.getfixturevalue("no_descriptor_is_left")
    assert is_alive(process)
    watch = ProcessWatch(process)
    assert not watch.gone()
    assert send_signal(process, signal.SIGKILL)
    child.wait()
    assert not is_alive(process)
    assert watch.gone()


@linux
def test_where_proc_shows_the_pids_of_another_namespace_it_is_not_asked(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_proc_is_ours", lambda: False)
    assert identity_of(child.pid) == ProcessIdentity(child.pid, 0)
    assert is_alive(ProcessIdentity(child.pid, 12345))
    child.kill()
    child.wait()
    assert identity_of(child.pid) is None


def test_elsewhere_than_on_linux_the_kernels_record_counts_too(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness.sys, "platform", "darwin")
    process = known(child)
    boot = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot + 3600)
    assert identity_of(child.pid) == process
    assert not is_alive(ProcessIdentity(process.pid, process.started + 1))
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(process) is ProcessState.STOPPED)
    child.kill()
    child.wait()
    assert state_of(process) is ProcessState.GONE


def test_several_threads_may_ask_one_watch(child: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatch(known(child))
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(lambda: [watch.gone() for _ in range(20_000)]) for _ in range(3)]
        assert not any(any(future.result(60)) for future in asked)
    watch.close()


def test_this_process_is_known_to_itself_and_its_machine() -> None:
    assert this_process().pid == os.getpid()
    assert state_of(this_process()) is ProcessState.RUNNING
    assert machine_id() == machine_id()


def have_files_say(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a text in the place of each file that is read."""
    monkeypatch.setattr(liveness, "open", lambda path, encoding: io.StringIO(text), raising=False)


@linux
def test_after_another_boot_it_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks that were counted since an earlier boot say nothing of the processes of this one."""
    have_files_say("0b5ff58b-0d2c-4f4c-9ba1-6e2d25c71cc1\n", monkeypatch)
    assert machine_id.__wrapped__() != machine_id()
    monkeypatch.undo()
    assert machine_id.__wrapped__() == machine_id()


def test_only_this_machine_with_another_boot_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = (f"{uuid.uuid4()}:4026531836" for _ in range(2))
    monkeypatch.setattr(liveness, "machine_id", lambda: now)
    monkeypatch.setattr(liveness, "lasting_machine_id", lambda: "this")
    assert was_started_again(before, "this")
    assert not was_started_again(now, "this")
    # Another container, or another machine with the same files.
    assert not was_started_again(now.replace("4026531836", "4026532000"), "this")
    assert not was_started_again(before, "another")
    # Nothing is known of one of them.
    assert not was_started_again(before, "")
    assert not was_started_again("", "this")
    assert not was_started_again("name:c0ffee", "this")
    monkeypatch.setattr(liveness, "machine_id", lambda: "name:c0ffee")
    assert not was_started_again(before, "this")
    monkeypatch.setattr(liveness, "lasting_machine_id", lambda: "")
    assert not was_started_again(before, "")


def test_the_lasting_name_of_a_machine_tells_neither_its_number_nor_is_it_that_of_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_files_say("\n", monkeypatch)
    assert lasting_machine_id.__wrapped__() == ""
    have_files_say("3d1219c7c4c5404aaa1f6d2a48adfda4\n", monkeypatch)
    names = []
    for node in ("a", "a", "b"):
        monkeypatch.setattr(liveness.platform, "node", lambda node=node: node)
        names.append(lasting_machine_id.__wrapped__())
    assert names[0] == names[1] != names[2]
    assert "3d1219c7" not in names[0]


@linux
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="makes a namespace")
def test_where_boot_has_another_time_is_another_machine() -> None:
    script = "from nbengine.ipc.liveness import machine_id; print(machine_id(), end='')"
    command = ["unshare", "--time", "--boottime", "3600", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no time namespace: {done.stderr}")
    assert done.stdout != machine_id()
