"""Real processes and sockets; every test is checked for what it leaves behind."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Engines beside each other: threads that wait for each other at each product cost them two to four times the processor.
# Before torch is imported, here and in every process that is started.
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("process_support")

from process_support.engine_mould import Mould
from process_support.engine_under_test import EngineUnderTest, fake_config
from process_support.leaks import leftovers, set_modules_aside, take_snapshot

from nbengine.client.engines import directory

StartEngine = Callable[..., EngineUnderTest]


@pytest.fixture(scope="session", autouse=True)
def private_socket_dir() -> Iterator[Path]:
    """Directory in which the engines of this session make their run directories."""
    with (
        tempfile.TemporaryDirectory(prefix="nbx-") as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


@pytest.fixture(scope="session")
def mould() -> Iterator[Mould]:
    """Return the process that engines' processes are copies of; it imports what they need while the first tests run."""
    with Mould() as mould, mould.hidden():
        yield mould


@pytest.fixture(scope="module", autouse=True)
def processes_are_copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have engines' processes copied, except in files that are about how processes are started."""
    if request.node.get_closest_marker("fresh_processes"):
        yield
        return
    with request.getfixturevalue("mould").used():
        yield


@pytest.fixture(autouse=True)
def orphans_of_other_runs_left_alone(monkeypatch: pytest.MonkeyPatch, private_runtime_dir: Path) -> None:
    """Let no test reap, or be kept from it by, what the tests of another process have just killed the host of."""
    find = directory._find_orphans

    def is_of_this_run(pid: int) -> bool:
        try:
            log = os.readlink(f"/proc/{pid}/fd/2")
        except OSError:
            # It has ended meanwhile, and keeps nobody from anything.
            return False
        return not log.endswith(".log") or log.startswith(f"{private_runtime_dir}/")

    monkeypatch.setattr(
        directory, "_find_orphans", lambda: [each for each in find() if is_of_this_run(each.pid)]
    )


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients wait for processes that get no processor for a while."""
    monkeypatch.setattr("nbengine.client.link.ready_wait.ATTACH_PATIENCE", 60.0)
    monkeypatch.setattr("nbengine.client.link.ready_wait.HOST_PATIENCE", 60.0)
    monkeypatch.setattr("nbengine.client.link.ready_wait.BUSY_PATIENCE", 60.0)
    monkeypatch.setattr("nbengine.client.link.engine_verdict.LAST_WORDS_TIMEOUT", 60.0)


@contextmanager
def nothing_is_left_in(*directories: Path) -> Iterator[None]:
    """Check that nothing is there at the end that was not there before."""
    set_modules_aside()
    before = take_snapshot(list(directories))
    yield
    found = leftovers(before, list(directories))
    assert not found, "left behind: " + "; ".join(found)


@pytest.fixture(autouse=True)
def no_leftovers(private_runtime_dir: Path, private_socket_dir: Path) -> Iterator[None]:
    """Check that no process, thread, socket, file or shared-memory segment outlives its test."""
    with nothing_is_left_in(private_runtime_dir, private_socket_dir):
        yield


@pytest.fixture(scope="module")
def no_leftovers_of_module(private_runtime_dir: Path, private_socket_dir: Path) -> Iterator[None]:
    """Check the same of what the tests of a file share, which each of them finds there already."""
    with nothing_is_left_in(private_runtime_dir, private_socket_dir):
        yield


@pytest.fixture(scope="module")
def start_shared_engine(no_leftovers_of_module: None) -> Iterator[StartEngine]:
    """Start an engine with the fake executor for all tests of a file, which leave it as it is.

    It is there with all its processes: one that came later would be found by the first test, and kept against it.
    """
    engines: list[EngineUnderTest] = []

    def start(knobs: dict | None = None, **config) -> EngineUnderTest:
        engine = EngineUnderTest(fake_config(knobs, **config))
        engines.append(engine)
        engine.wait_ready()
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def start_engine(no_leftovers: None) -> Iterator[StartEngine]:
    """Start an engine with the fake executor; it is ended after the test, whatever state it is in."""
    engines: list[EngineUnderTest] = []

    def start(knobs: dict | None = None, name: str | None = None, **config) -> EngineUnderTest:
        engine = EngineUnderTest(fake_config(knobs, **config), name)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
