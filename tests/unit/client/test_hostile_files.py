"""Connection files that somebody else wrote: no reader removes, reads or trusts what they name."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Pipe
from pathlib import Path

import msgspec
import pytest

from nbengine import AsyncLLM
from nbengine.cli import main
from nbengine.client.engines import directory, launch
from nbengine.client.engines.directory import find_engine, list_engines, reap, stop_engine
from nbengine.client.engines.logs import find_log, last_words_of, log_of
from nbengine.client.link import host_link
from nbengine.client.link.host_link import HostLink
from nbengine.cluster import keeper
from nbengine.cluster.messages import RunCore
from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError, NBEngineError
from nbengine.ipc.liveness import machine_id
from nbengine.runtime import directories
from nbengine.runtime.connection import (
    ConnectionInfo,
    connection_file,
    engine_file,
    list_connections,
    log_dir,
    read_connection,
    remove_core_files,
    runtime_dir,
    write_connection,
    write_engine_file,
)
from nbengine.runtime.directories import EngineDirectories

NAME = "hostile"


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directories of its own for everything that an engine has."""
    with tempfile.TemporaryDirectory(prefix="nbh-") as made:
        root = Path(made)
        for name in ("run", "shm", "files"):
            (root / name).mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / "run"))
        monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(root / "files"))
        monkeypatch.setattr(directories, "SHARED_MEMORY", root / "shm")
        monkeypatch.setattr(launch, "_children", {})
        # What is reaped lies here, and nobody else's processes are ended.
        monkeypatch.setattr(directory, "places", lambda: [str(root / "run")])
        monkeypatch.setattr(directory, "_kill_orphans", list)
        yield root


@pytest.fixture(scope="module")
def dead_pid() -> int:
    """Return the pid of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def victim(place: Path) -> Path:
    """Somebody's work, in a directory that could be an engine's by place, name, owner and mode."""
    victim = place / "run" / "nbe-victim00"
    victim.mkdir(mode=0o700)
    (victim / "thesis").write_text("years of work")
    (victim / "c-1.in").touch()
    return victim


def connection(pid: int, run_dir: object, tensor_dir: object = "", marker: str = "0" * 32) -> ConnectionInfo:
    return ConnectionInfo(
        name=NAME,
        run_dir=str(run_dir),
        tensor_dir=str(tensor_dir),
        marker=marker,
        log_path=str(log_dir() / f"{NAME}.log"),
        host_pid=pid,
        host_started=1,
        config=EngineConfig(),
        machine=machine_id(),
    )


def unmarked(pid: int, victim: Path) -> ConnectionInfo:
    return connection(pid, victim)


def without_a_marker_in_the_file(pid: int, victim: Path) -> ConnectionInfo:
    return connection(pid, victim, marker="")


def through_a_link(pid: int, victim: Path) -> ConnectionInfo:
    link = victim.with_name("nbe-link0000")
    link.symlink_to(victim)
    return connection(pid, link)


def named_as_tensors(pid: int, victim: Path) -> ConnectionInfo:
    own = EngineDirectories.make()
    return connection(pid, own.run_dir, victim, own.marker)


def with_the_marker_of_another_engine(pid: int, victim: Path) -> ConnectionInfo:
    own = EngineDirectories.make()
    (victim / "marker").write_text("f" * 32)
    return connection(pid, victim, own.tensor_dir, own.marker)


def marked_but_of_another_owner(pid: int, victim: Path) -> ConnectionInfo:
    (victim / "marker").write_text("0" * 32)
    os.chown(victim, 12345, 12345)
    return connection(pid, victim)


def marked_but_open_to_others(pid: int, victim: Path) -> ConnectionInfo:
    (victim / "marker").write_text("0" * 32)
    victim.chmod(0o755)
    return connection(pid, victim)


FORGERIES = [
    unmarked,
    without_a_marker_in_the_file,
    through_a_link,
    named_as_tensors,
    with_the_marker_of_another_engine,
    marked_but_of_another_owner,
    marked_but_open_to_others,
]


class Listener:
    """Hears what a link has to say."""

    def __init__(self) -> None:
        self.dead: Future[Exception] = Future()

    def on_dead(self, error: Exception) -> None:
        self.dead.set_result(error)


def by_attaching(info: ConnectionInfo) -> None:
    with pytest.raises(NBEngineError, match="is dead"):
        AsyncLLM.attach(write_connection(info))


def by_finding(info: ConnectionInfo) -> None:
    write_connection(info)
    with pytest.raises(NBEngineError, match="is dead"):
        find_engine(NAME)


def by_listing(info: ConnectionInfo) -> None:
    write_connection(info)
    assert [listing.state for listing in list_engines()] == ["dead"]


def by_listing_in_the_shell(info: ConnectionInfo) -> None:
    write_connection(info)
    assert main(["ps"]) == 0


def by_launching_under_its_name(info: ConnectionInfo) -> None:
    write_connection(info)
    with pytest.raises(EngineStartError, match="cannot be started"):
        launch.launch_engine(EngineConfig(), name=NAME)


def by_launching_beside_it(info: ConnectionInfo) -> None:
    write_connection(info)
    with pytest.raises(EngineStartError, match="cannot be started"):
        launch.launch_engine(EngineConfig(), name="other")


def by_stopping(info: ConnectionInfo) -> None:
    stop_engine(info, timeout=0.1)


def by_reaping(info: ConnectionInfo) -> None:
    write_connection(info)
    assert reap().dead == [NAME]
    assert not connection_file(NAME).exists()


def by_reaping_what_is_old(info: ConnectionInfo) -> None:
    """Let a reaping find the file, which lies in the directory itself, as an engine's does."""
    if os.path.islink(info.run_dir):
        info = msgspec.structs.replace(info, run_dir=os.path.realpath(info.run_dir))
    write_engine_file(info)
    os.utime(info.run_dir, (1, 1))
    removed = reap().removed_dirs
    assert not any("victim" in path for path in removed)


def by_the_death_of_its_host(info: ConnectionInfo) -> None:
    listener = Listener()
    link = HostLink(info, "s", f"ipc://{info.run_dir}/c-2.in", f"ipc://{info.run_dir}/c-2.out", listener)
    link.start()
    assert isinstance(listener.dead.result(60), EngineStartError)
    link.join()


def by_ending_as_its_core(info: ConnectionInfo) -> None:
    remove_core_files(info)


DOORS = [
    by_attaching,
    by_finding,
    by_listing,
    by_listing_in_the_shell,
    by_launching_under_its_name,
    by_launching_beside_it,
    by_stopping,
    by_reaping,
    by_reaping_what_is_old,
    by_the_death_of_its_host,
    by_ending_as_its_core,
]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.__name__)
def test_a_file_that_names_somebody_elses_directory_does_not_get_it_removed(
    victim: Path,
    dead_pid: int,
    forgery: Callable[[int, Path], ConnectionInfo],
    door: Callable[[ConnectionInfo], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if forgery is marked_but_of_another_owner and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    # What is still to be sent to a host that is gone is not waited for.
    monkeypatch.setattr(host_link, "EXIT_TIMEOUT", 0.0)
    door(forgery(dead_pid, victim))
    assert (victim / "thesis").read_text() == "years of work"


def test_a_keeper_writes_into_and_removes_its_own_directories_alone(
    victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(keeper, "_redirect_output", lambda path: None)
    monkeypatch.setattr(keeper, "core_child", lambda run_dir, rank, secret: started.append(run_dir))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ours, theirs = Pipe()
    with ours, contextlib.closing(theirs):
        kept = keeper.Keeper(ours, "node", "127.0.0.1", "label")
        own = kept._directories
        kept._start(RunCore(connection(1, victim, victim), 0, 1, b"secret"))
        assert started == [own.run_dir]
        named = read_connection(engine_file(own.run_dir))
        assert (named.run_dir, named.tensor_dir, named.marker) == (own.run_dir, own.tensor_dir, own.marker)
        ours.close()
        kept.run()
    assert not any(map(os.path.exists, own.paths))
    assert sorted(os.listdir(victim)) == ["c-1.in", "thesis"]


# What the files themselves may be.


def planted(kind: str, place: Path, dead_pid: int) -> Path:
    good = place / "good.json"
    good.write_bytes(msgspec.json.encode(connection(dead_pid, "/tmp/nbe-none0000")))
    path = connection_file(NAME)
    if kind == "link":
        path.symlink_to(good)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "device":
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    elif kind == "directory":
        path.mkdir()
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "deep":
        path.write_bytes(b"[" * 100_000 + b"]" * 100_000)
    else:
        path.write_bytes(good.read_bytes())
    if kind == "of another user":
        os.chown(path, 12345, 12345)
    elif kind == "writable":
        path.chmod(0o666)
    elif kind == "unreadable":
        path.chmod(0)
    return path


KINDS = {
    "link": "it is a link",
    "pipe": "it is not a plain file",
    "device": "it is not a plain file",
    "directory": "it is not a plain file",
    "huge": "it has more than 16 MiB",
    "deep": "is not a connection file of nbengine",
    "of another user": "it belongs to another user",
    "writable": "others can write it",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_this_users_own_is_refused_with_one_line_and_keeps_nobody_waiting(
    place: Path, dead_pid: int, kind: str
) -> None:
    if kind in ("of another user", "device") and os.geteuid() != 0:
        pytest.skip("only root can make such a file")
    path = planted(kind, place, dead_pid)
    for look in (lambda: find_engine(path), lambda: find_engine(NAME), lambda: AsyncLLM.attach(path)):
        with pytest.raises(NBEngineError, match=KINDS[kind]) as caught:
            look()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert list_connections() == []
    assert list_engines() == []
    assert reap().dead == []
    assert os.path.lexists(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "../../etc/x"}, "no engine has the name"),
        ({"name": ""}, "no engine has the name"),
        ({"run_dir": "relative"}, "its run_dir is relative"),
        ({"run_dir": ""}, "its run_dir is ''"),
        ({"run_dir": "/tmp/../home"}, "its run_dir is /tmp/../home"),
        ({"run_dir": "/tmp/nbe-\0"}, "its run_dir|null byte"),
        ({"tensor_dir": "/dev/shm/\0"}, "null byte"),
        ({"log_path": "\0"}, "null byte"),
    ],
)
def test_names_that_no_engine_can_have_are_refused(dead_pid: int, changes: dict[str, str], said: str) -> None:
    info = msgspec.structs.replace(connection(dead_pid, "/tmp/nbe-none0000"), **changes)
    path = connection_file(NAME)
    path.write_bytes(msgspec.json.encode(info))
    with pytest.raises(NBEngineError, match=said):
        read_connection(path)


@pytest.mark.parametrize("where", ["elsewhere", "link", "pipe", "dots", "of another user", "missing"])
@pytest.mark.timeout(20)
def test_a_file_that_is_no_log_of_this_users_engines_is_not_shown(
    place: Path, dead_pid: int, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    secret, log = place / "secret.log", log_dir() / f"{NAME}.log"
    secret.write_text("a secret")
    if where == "link":
        log.symlink_to(secret)
    elif where == "pipe":
        os.mkfifo(log, 0o600)
    elif where == "of another user":
        log.write_text("a secret")
        os.chown(log, 12345, 12345)
    paths = {"elsewhere": str(secret), "dots": f"{log_dir()}/../../secret.log"}
    info = connection(dead_pid, "/tmp/nbe-none0000")
    info.log_path = paths.get(where, info.log_path)
    write_connection(info)
    assert last_words_of(info) == ""
    for words in (["logs", NAME], ["logs", "-f", NAME]):
        main(words)
        shown = capsys.readouterr()
        assert "secret" not in shown.out
        assert "Traceback" not in shown.err
    assert not (where in paths and log_path_is_taken(info))


def log_path_is_taken(info: ConnectionInfo) -> bool:
    with contextlib.suppress(NBEngineError):
        return bool(log_of(info))
    return False


@pytest.mark.parametrize("name", ["../x", "a/b", "", "x" * 10**6, "\0", "\udc80", "a\nb", "e*"])
def test_a_name_that_no_engine_can_have_has_no_log_and_no_engine(name: str) -> None:
    for look in (find_log, find_engine):
        with pytest.raises(NBEngineError) as caught:
            look(name)
        message = str(caught.value)
        assert len(message) < 400
        assert message.isprintable()


# The directories that files lie in.


def test_a_runtime_directory_of_another_user_is_refused(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(place / "files", 12345, 12345)
    for door in (list_engines, reap, lambda: find_engine("x"), lambda: launch.launch_engine(EngineConfig())):
        with pytest.raises(NBEngineError, match="belongs to another user") as caught:
            door()
        assert str(place / "files") in str(caught.value)
        assert "NBENGINE_RUNTIME_DIR" in str(caught.value)
    assert os.listdir(place / "run") == []


def test_a_runtime_directory_in_which_all_may_replace_files_is_refused(place: Path) -> None:
    (place / "files").chmod(0o777)
    with pytest.raises(NBEngineError, match="lets every user replace"):
        runtime_dir()
    (place / "files").chmod(0o1777)
    assert runtime_dir() == place / "files"


@pytest.mark.parametrize("door", [log_dir, lambda: launch.launch_engine(EngineConfig())])
def test_a_log_directory_of_another_user_is_refused(place: Path, door: Callable[[], object]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    (place / "files" / "nbengine-logs").mkdir()
    os.chown(place / "files" / "nbengine-logs", 12345, 12345)
    with pytest.raises(NBEngineError, match=r"the directory of logs .* belongs to another user"):
        door()
    assert os.listdir(place / "run") == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["link", "pipe", "of another user", "directory"])
def test_a_launch_lock_that_somebody_else_put_there_is_refused(place: Path, kind: str) -> None:
    lock = place / "files" / "nbengine-launch.lock"
    if kind == "link":
        lock.symlink_to(place / "target")
    elif kind == "pipe":
        os.mkfifo(lock, 0o600)
    elif kind == "directory":
        lock.mkdir()
    elif os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    else:
        lock.touch(0o600)
        os.chown(lock, 12345, 12345)
    with pytest.raises(NBEngineError, match=str(lock)):
        launch.launch_engine(EngineConfig())
    assert os.listdir(place / "run") == []
    assert not (place / "target").exists()


def test_old_logs_that_are_no_files_do_not_keep_an_engine_from_starting() -> None:
    for number in range(30):
        (log_dir() / f"e{number}.log").mkdir()
    assert launch._new_log_file("e").is_file()
