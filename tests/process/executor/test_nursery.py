"""Workers that are forked from a nursery are as good as those that are started one by one, however the start goes."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from process_support.engine_under_test import wait_for
from process_support.fake_worker import FakeWorkersExecutor, fake_workers_config

from nbengine.errors import EngineDeadError, EngineStartError
from nbengine.executor import multiproc, watch
from nbengine.ipc.control_messages import Progress
from nbengine.runtime import nursery
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.logs import worker_log_path
from tests.support.thorough import amount

pytestmark = pytest.mark.fresh_processes

NOTICED = 60.0
NUM_KILLS = amount(4, thorough=100)
WORKER = """
import os, random, secrets, signal, sys, time
from process_support.fake_worker import FakeWorker

pid = os.getpid()
with open({imports!r}, "a") as file:
    file.write(f"{{pid}}\\n")


class Worker(FakeWorker):
    def draws(self):
        return random.random(), secrets.token_hex(), str(self.layout.rank)

    def environment(self):
        return os.getppid(), os.getsid(0), os.getpgrp(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    def links(self):
        paths = [f"/proc/self/fd/{{fd}}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
        # The descriptor of the list itself is closed.
        return [os.readlink(path) for path in paths if os.path.lexists(path)]


{trouble}
"""

StartOwn = Callable[..., FakeWorkersExecutor]


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    """The file in which each process that imports the worker's module notes its pid."""
    return tmp_path / "imports"


@pytest.fixture
def start(
    no_leftovers: None,
    tmp_path: Path,
    imports: Path,
    files: ExecutorFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[StartOwn]:
    """Start an executor whose workers' module does `trouble` when it is imported; it is ended after the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((os.environ["PYTHONPATH"], str(tmp_path))))
    executors: list[FakeWorkersExecutor] = []

    def start(tp: int, trouble: str = "", progress=None, given: ExecutorFiles | None = files):
        name = f"worker_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(WORKER.format(imports=str(imports), trouble=trouble))
        kind = type("Executor", (FakeWorkersExecutor,), {"worker_class": f"{name}:Worker"})
        executor = kind(fake_workers_config(tp), progress, given)
        executors.append(executor)
        return executor

    yield start
    for executor in executors:
        executor.shutdown()


def pids_of(executor: FakeWorkersExecutor) -> list[int]:
    return [worker.process.pid for worker in executor._workers]


def adopts_orphans() -> bool:
    before = ctypes.c_int()
    nursery._prctl(nursery.PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    return bool(before.value)


def expect_nothing_left(files: ExecutorFiles) -> None:
    """Neither a process, not even one that nobody has waited for, nor a file."""
    assert not psutil.Process().children(recursive=True)
    assert not [*Path(files.sockets).iterdir(), *Path(files.shared_memory).iterdir()]
    assert not adopts_orphans()


# A start that goes well.


def test_what_workers_need_is_imported_once_and_they_are_this_processs_children(start, imports) -> None:
    executor = start(4)
    pids = executor.collective_rpc("pid")
    assert pids_of(executor) == pids
    assert len(set(pids)) == 4
    (imported,) = imports.read_text().split()
    assert int(imported) not in pids
    assert {child.pid for child in psutil.Process().children()} == set(pids)
    environment = (os.getpid(), os.getsid(0), os.getpgrp(), True)
    assert executor.collective_rpc("environment") == [environment] * 4
    assert not adopts_orphans()


def test_without_directories_of_a_host_each_worker_leads_a_session_of_its_own(start) -> None:
    executor = start(2, given=None)
    expected = [(os.getpid(), pid, pid, True) for pid in pids_of(executor)]
    assert executor.collective_rpc("environment") == expected


def test_workers_share_no_random_numbers(start) -> None:
    assert all(len(set(column)) == 3 for column in zip(*start(3).collective_rpc("draws"), strict=True))


def test_each_worker_writes_into_its_own_log_and_holds_no_other_and_no_line_of_anothers(start) -> None:
    executor = start(3)
    executor.collective_rpc("check_health")
    links = executor.collective_rpc("links")
    sockets = [{link for link in each if link.startswith("socket:")} for each in links]
    assert not set.intersection(*sockets)
    for rank, each in enumerate(links):
        assert not [link for link in each if link.endswith(".log")]
        log = worker_log_path(executor._files.log, rank).read_text()
        assert set(re.findall(r"\[worker (\d)\]", log)) == {str(rank)}


def test_the_end_of_one_worker_is_the_end_of_its_line_at_once(start, monkeypatch) -> None:
    # Without these the line alone tells.
    monkeypatch.setattr(watch, "_pidfd", lambda _: None)
    executor = start(3)
    told = threading.Event()
    executor.register_failure_callback(lambda _: told.set())
    os.kill(pids_of(executor)[1], signal.SIGKILL)
    assert told.wait(NOTICED)
    with pytest.raises(EngineDeadError, match=r"worker 1 \(TP1\), pid \d+, was killed by signal 9"):
        executor.check_health()
    executor.shutdown()
    assert [worker.process.wait(0) for worker in executor._workers][1] == -signal.SIGKILL


def test_all_ranks_are_reported_while_the_nursery_imports(start, imports) -> None:
    seen = []

    def progress(message: Progress) -> None:
        if message.detail == "starting":
            seen.append((message.worker, imports.exists()))

    start(2, progress=progress)
    assert seen == [(0, False), (1, False)]


def test_a_process_that_adopts_orphans_goes_on_doing_so(start) -> None:
    nursery._prctl(nursery.PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        start(2)
        assert adopts_orphans()
    finally:
        nursery._prctl(nursery.PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0))


@pytest.mark.parametrize("tp", [1, 2])
def test_where_orphans_cannot_be_adopted_and_for_a_single_worker_each_imports_by_itself(
    start, imports, monkeypatch, tp
) -> None:
    monkeypatch.setattr(multiproc, "can_adopt", lambda: tp == 1)
    executor = start(tp)
    assert sorted(map(int, imports.read_text().split())) == sorted(pids_of(executor))


# A start that does not.


def test_a_module_that_cannot_be_imported_is_a_workers_failure(start, files) -> None:
    with pytest.raises(
        EngineStartError, match=r"worker \d \(TP\d\), pid \d+, failed in start: OSError: no disk"
    ):
        start(2, "raise OSError('no disk')")
    expect_nothing_left(files)


@pytest.mark.parametrize(
    ("trouble", "end"),
    [
        ("os.kill(pid, signal.SIGKILL)", r"was killed by signal 9 \(SIGKILL\)"),
        ("os._exit(3)", "exited with status 3"),
        ("sys.exit(4)", "exited with status 4"),
        ("def fork():\n    raise OSError('the last words')\nos.fork = fork", "exited with status 1"),
    ],
)
def test_the_end_of_the_nursery_is_told_with_its_log(start, files, trouble: str, end: str) -> None:
    with pytest.raises(EngineStartError) as raised:
        start(2, f"print('the last words', file=sys.stderr)\n{trouble}")
    expected = rf"at the start, the process that imports for all workers, pid \d+, {end}"
    assert re.match(expected, raised.value.cause)
    assert "the last words" in raised.value.log_tail
    expect_nothing_left(files)


KILLED_IN_FORK = """
forks = []
os.register_at_fork(
    before=lambda: forks.append(0), after_in_{side}=lambda: len(forks) == {fork} and os.kill(os.getpid(), signal.SIGKILL)
)
"""


@pytest.mark.parametrize("fork", [1, 2])
def test_a_nursery_that_is_killed_when_it_was_forked_into_some_leaves_none_of_them(
    start, files, fork: int
) -> None:
    trouble = KILLED_IN_FORK.format(side="parent", fork=fork)
    with pytest.raises(EngineStartError, match=r"the process that imports for all workers.*SIGKILL"):
        start(3, trouble)
    expect_nothing_left(files)


def test_a_nursery_that_is_killed_when_it_was_forked_into_all_is_not_missed(start) -> None:
    executor = start(3, KILLED_IN_FORK.format(side="parent", fork=3))
    assert executor.collective_rpc("pid") == pids_of(executor)


def test_a_worker_that_is_killed_as_soon_as_it_is_there_is_named(start, files) -> None:
    trouble = KILLED_IN_FORK.format(side="child", fork=2)
    with pytest.raises(EngineStartError, match=r"worker 1 \(TP1\), pid \d+, was killed by signal 9"):
        start(3, trouble)
    expect_nothing_left(files)


KILLED_WITH_ITS_QUEUE = """
from nbengine.executor import worker_proc
forks = []
os.register_at_fork(before=lambda: forks.append(0))
class Queue(worker_proc.MessageQueue):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if len(forks) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
worker_proc.MessageQueue = Queue
"""


def test_a_worker_that_is_killed_when_it_has_made_its_queue_leaves_nothing(start, files) -> None:
    with pytest.raises(EngineStartError, match=r"worker 1 \(TP1\), pid \d+, was killed by signal 9"):
        start(3, KILLED_WITH_ITS_QUEUE)
    expect_nothing_left(files)


def test_an_interrupt_while_the_nursery_imports_leaves_nothing(start, files, imports) -> None:
    def interrupt() -> None:
        wait_for(imports.exists, "the import")
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        start(2, "time.sleep(3600)")
    interrupter.join()
    expect_nothing_left(files)


def test_a_nursery_that_is_killed_at_any_moment_leaves_nothing(start, files) -> None:
    """Whichever process is the oldest child at that moment: the nursery, or the first worker."""
    chooser = random.Random(7)
    ends = set()
    for _ in range(NUM_KILLS):
        timer = threading.Timer(chooser.uniform(0.0, 0.8), kill_the_oldest_child)

        def progress(message: Progress, timer: threading.Timer = timer) -> None:
            if (message.detail, message.worker) == ("starting", 0):
                timer.start()

        executor, cause = None, "it started"
        try:
            executor = start(3, progress=progress)
        except EngineStartError as error:
            cause = error.cause
        except EngineDeadError as error:
            # All had started, and were about to meet: the cause is a worker's end.
            cause = "it started" if "SIGKILL" in str(error) else str(error)
        timer.join()
        if executor is not None:
            executor.shutdown()
        ends.add(re.match(r"it started|at the start, (?:the process|worker)(?=.*SIGKILL)", cause)[0])
        expect_nothing_left(files)
    assert "at the start, the process" in ends


def kill_the_oldest_child() -> None:
    with suppress(IndexError, psutil.NoSuchProcess):
        psutil.Process().children()[0].kill()


def test_what_workers_import_touches_no_gpu_and_leaves_a_single_thread_to_fork() -> None:
    """A process that has looked for GPUs gives its forks no more use of them, and threads would be lost."""
    code = """
import os, threading, torch, zmq
def touched(*_):
    raise AssertionError("a GPU was looked for")
for name in ("is_available", "device_count", "current_device", "_lazy_init", "init"):
    setattr(torch.cuda, name, touched)
import nbengine.executor.worker_proc, nbengine.worker.worker
assert threading.active_count() == 1
assert zmq.Context._instance is None
pid = os.fork()
if not pid:
    os._exit(0)
os.waitpid(pid, 0)
# Before a fork OpenBLAS ends its threads.
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


SCRIPT = """
import json, sys
from process_support.fake_worker import FakeWorkersExecutor, fake_workers_config

class Executor(FakeWorkersExecutor):
    worker_class = {worker!r}
    def _report_start(self, progress):
        print(json.dumps([self._own_directories.paths, self._files.log]), flush=True)

Executor(fake_workers_config(3))
print("started", flush=True)
sys.stdin.read()
"""


def test_a_script_that_is_killed_at_any_moment_of_a_start_leaves_nothing(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_worker.py").write_text(
        "import time\nfrom process_support.fake_worker import FakeWorker\ntime.sleep(0.2)\n"
    )
    mark = uuid.uuid4().hex
    path = os.pathsep.join((os.environ["PYTHONPATH"], str(tmp_path)))
    chooser = random.Random(11)
    for _ in range(NUM_KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(worker="slow_worker:FakeWorker")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"NBENGINE_TEST_MARK": mark, "PYTHONPATH": path},
        ) as script:
            directories = [Path(each) for each in json.loads(script.stdout.readline())[0]]
            assert all(map(Path.is_dir, directories))
            # Moments are what is tried: from the nursery's start until all workers are ready.
            with suppress(subprocess.TimeoutExpired):
                script.wait(chooser.uniform(0.0, 1.0))
            script.kill()
        wait_for(lambda: not marked(mark), "the end of the processes", NOTICED)
        # A process whose title has been set hides its environment: one may still remove them.
        wait_for(lambda there=directories: not any(map(Path.exists, there)), "the end of its files", NOTICED)


KILLS_ITS_PARENT = """
forks = []
def kill():
    forks.append(0)
    if len(forks) == {fork}:
        os.kill(os.getppid(), signal.SIGKILL)
        if {and_ends}:
            os._exit(0)
os.register_at_fork({moment}=kill)
from process_support.fake_worker import FakeWorker
"""


@pytest.mark.parametrize(
    "trouble",
    [
        "time.sleep(3600)",
        "while True: pass",
        KILLS_ITS_PARENT.format(moment="before", fork=1, and_ends=False),
        KILLS_ITS_PARENT.format(moment="after_in_parent", fork=2, and_ends=False),
        KILLS_ITS_PARENT.format(moment="after_in_parent", fork=3, and_ends=True),
    ],
    ids=["import", "busy import", "first fork", "second fork", "workers wait"],
)
def test_a_nursery_and_its_workers_end_and_clean_up_when_the_process_that_needs_them_is_killed(
    tmp_path, trouble: str
) -> None:
    (tmp_path / "stuck_worker.py").write_text(
        f"import os, signal, time\nprint('here', flush=True)\n{trouble}\n"
    )
    mark = uuid.uuid4().hex
    path = os.pathsep.join((os.environ["PYTHONPATH"], str(tmp_path)))
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(worker="stuck_worker:FakeWorker")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"NBENGINE_TEST_MARK": mark, "PYTHONPATH": path},
    ) as script:
        paths, own_log = json.loads(script.stdout.readline())
        directories, log = [Path(each) for each in paths], worker_log_path(own_log, 0)

        def is_there() -> bool:
            # One that has killed the script removes the log, maybe after the script was looked at.
            with suppress(FileNotFoundError):
                return script.poll() is not None or "here" in log.read_text()
            return False

        wait_for(is_there, "the import")
        if "getppid" in trouble:
            assert script.wait(NOTICED) == -signal.SIGKILL
        script.kill()
    start = time.monotonic()
    wait_for(lambda: not marked(mark), "the end of the nursery", NOTICED)
    assert time.monotonic() - start < NOTICED
    wait_for(lambda: not any(map(Path.exists, directories)), "the end of its files", NOTICED)


def marked(mark: str) -> list[int]:
    """The processes that have a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("NBENGINE_TEST_MARK") == mark:
                found.append(process.pid)
    return found
