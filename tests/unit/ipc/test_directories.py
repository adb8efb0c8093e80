"""Directories of engines: made as they should be, and removed only if they are what they are said to be.

Whatever may be removed here lies in `place`. Paths of the machine's own go to the check alone, which removes nothing: a
mistake in the code under test must cost no more than a temporary directory.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbengine.errors import EngineStartError, NBEngineError
from nbengine.ipc.shm_tensors import ShmTensorSender
from nbengine.runtime import directories
from nbengine.runtime.directories import EngineDirectories, marker_of, remove_client_socket

IS_ROOT = os.geteuid() == 0


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a directory for run directories; `shm` in it takes the place of shared memory."""
    with tempfile.TemporaryDirectory(prefix="nbp-") as directory:
        (Path(directory) / "shm").mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setattr(directories, "SHARED_MEMORY", Path(directory) / "shm")
        monkeypatch.setattr(directories, "_noted", set())
        yield Path(directory)


@pytest.fixture
def own(place: Path) -> EngineDirectories:
    """The directories of an engine, with something in them."""
    own = EngineDirectories.make()
    (place / "linked").mkdir()
    (place / "linked" / "file").touch()
    for path in own.paths:
        (Path(path) / "inner").mkdir()
        (Path(path) / "inner" / "file").write_text("x")
        (Path(path) / "link").symlink_to(place / "linked")
    return own


@pytest.fixture
def victim(place: Path) -> Path:
    """A directory that looks like a run directory, and is somebody's work."""
    victim = place / "nbe-victim00"
    victim.mkdir(mode=0o700)
    (victim / "thesis").write_text("years of work")
    return victim


def stands(victim: Path) -> bool:
    return (victim / "thesis").read_text() == "years of work"


def test_both_are_private_and_carry_the_marker(place: Path) -> None:
    own = EngineDirectories.make()
    assert Path(own.run_dir).parent == place
    assert own.tensor_dir == str(place / "shm" / f"nbengine-{place.name}-{Path(own.run_dir).name}")
    for path in own.paths:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
        assert marker_of(path) == own.marker
        assert stat.S_IMODE((Path(path) / "marker").stat().st_mode) == 0o600
    assert EngineDirectories.make().marker != own.marker


def test_tensors_lie_in_the_run_directory_where_shared_memory_cannot_be_had(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "SHARED_MEMORY", place / "missing")
    own = EngineDirectories.make()
    assert own.tensor_dir == f"{own.run_dir}/tensors"
    ShmTensorSender(own.tensor_dir, 1)
    assert own.paths == (own.run_dir,)
    own.remove()
    assert not os.path.exists(own.run_dir)


def test_they_are_removed_with_all_that_is_in_them_and_no_link_is_followed(
    own: EngineDirectories, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own.remove()
    assert not any(map(os.path.lexists, own.paths))
    own.remove()
    assert not caplog.records
    assert (place / "linked" / "file").exists()


def other_owner(path: Path) -> None:
    os.chown(path, 12345, 12345)


def other_mode(path: Path) -> None:
    path.chmod(0o750)


def no_marker(path: Path) -> None:
    (path / "marker").unlink()


def other_marker(path: Path) -> None:
    (path / "marker").write_text("0" * 32)


def marker_is_a_link(path: Path) -> None:
    copy = path.parent / "copy"
    (path / "marker").rename(copy)
    (path / "marker").symlink_to(copy)


def marker_is_a_pipe(path: Path) -> None:
    (path / "marker").unlink()
    os.mkfifo(path / "marker", 0o600)


def marker_of_another_owner(path: Path) -> None:
    os.chown(path / "marker", 12345, 12345)


def mounted_over(path: Path) -> None:
    """Mount a directory over itself, of which nothing but the mount's number tells."""
    done = subprocess.run(["mount", "--bind", path, path], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (other_owner, "not this user's alone"),
        (other_mode, "not this user's alone"),
        (no_marker, "no marker"),
        (other_marker, "no marker"),
        (marker_is_a_link, "it is a link"),
        (marker_is_a_pipe, "not a plain file"),
        (marker_of_another_owner, "another user"),
        (mounted_over, "mounted"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_the_engines_beyond_doubt_is_left_alone_and_the_log_says_so(
    own: EngineDirectories, harm: Callable[[Path], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    if harm in (other_owner, marker_of_another_owner, mounted_over) and not IS_ROOT:
        pytest.skip("only root can do this harm")
    harm(Path(own.run_dir))
    try:
        own.remove()
        assert (Path(own.run_dir) / "inner" / "file").read_text() == "x"
        assert not os.path.exists(own.tensor_dir)
        (record,) = caplog.records
        assert "is left alone" in record.message
        assert said in record.message
        assert own.run_dir in record.message
    finally:
        if harm is mounted_over:
            subprocess.run(["umount", own.run_dir], check=True)


def test_a_mount_inside_is_not_crossed(own: EngineDirectories, victim: Path) -> None:
    if not IS_ROOT:
        pytest.skip("only root can mount")
    inner = Path(own.run_dir) / "inner"
    if subprocess.run(["mount", "--bind", victim, inner], check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        own.remove()
        assert stands(victim)
    finally:
        subprocess.run(["umount", inner], check=True)
    # The marker has stayed, so that it can be removed once the mount has gone.
    own.remove()
    assert not os.path.exists(own.run_dir)


@pytest.mark.parametrize("named", ["elsewhere", "name", "null byte", "link"])
def test_a_directory_of_another_place_or_name_is_left_alone_whatever_it_holds(
    own: EngineDirectories, place: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """A copy with the right marker, which only somebody who can read the engine's files could make."""
    other = place / "other"
    other.mkdir()
    copy = other / ("work" if named == "name" else Path(own.run_dir).name)
    if named == "name":
        monkeypatch.setattr(directories, "_noted", {str(other)})
    shutil.copytree(own.run_dir, copy, symlinks=True)
    copy.chmod(0o700)
    link = place / "nbe-link0000"
    link.symlink_to(copy)
    paths = {"elsewhere": str(copy), "name": str(copy), "null byte": f"{own.run_dir}\0", "link": str(link)}
    replace(own, run_dir=paths[named], tensor_dir="").remove()
    assert (copy / "inner" / "file").exists()
    assert all(map(os.path.exists, own.paths))


@pytest.mark.parametrize("path", ["/", "", ".", "/tmp", "/tmp/nbe-", "nbe-abcd1234", "/tmp/../nbe-abcd1234"])
def test_what_can_be_no_run_directory_has_no_place(path: str) -> None:
    with pytest.raises(NBEngineError, match="run director"):
        EngineDirectories(path, "", "0" * 32)._place_of(path)


@pytest.mark.parametrize("path", ["/", "/dev/shm", "/dev/shm/nbengine-x-nbe-abcd1234", "/home", "tensors"])
def test_what_can_be_no_tensor_directory_has_no_place(path: str) -> None:
    with pytest.raises(NBEngineError, match="not where the tensors"):
        EngineDirectories("/tmp/nbe-abcd1234", path, "0" * 32)._place_of(path)


def test_only_the_tensor_directory_of_this_very_engine_is_removed(
    own: EngineDirectories, place: Path
) -> None:
    other = EngineDirectories.make()
    work = place / "shm" / "work"
    work.mkdir(mode=0o700)
    for path in (other.tensor_dir, str(work)):
        replace(own, tensor_dir=path).remove()
    assert os.path.isdir(other.tensor_dir)
    assert work.is_dir()
    assert not os.path.exists(own.run_dir)


def test_a_directory_that_comes_to_its_place_meanwhile_is_left_alone(
    own: EngineDirectories, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap is made at the latest moment there is: when all is checked, and all of the engine's is removed."""
    run_dir = Path(own.run_dir)
    aside = run_dir.with_name("aside")
    unlink = os.unlink

    def swap_then_unlink(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        if path == "marker" and not aside.exists():
            run_dir.rename(aside)
            victim.rename(run_dir)

    monkeypatch.setattr(os, "unlink", swap_then_unlink)
    replace(own, tensor_dir="").remove()
    assert stands(run_dir)
    assert list(aside.iterdir()) == []


@pytest.mark.parametrize("link", [True, False])
def test_a_swap_between_check_and_removal_removes_nothing_of_what_has_come(
    own: EngineDirectories, victim: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    run_dir = Path(own.run_dir)
    aside = run_dir.with_name("aside")
    empty = directories._empty

    def swap_then_empty(*arguments: object) -> None:
        if not aside.exists():
            run_dir.rename(aside)
            if link:
                run_dir.symlink_to(victim)
            else:
                victim.rename(run_dir)
        empty(*arguments)

    monkeypatch.setattr(directories, "_empty", swap_then_empty)
    replace(own, tensor_dir="").remove()
    assert stands(run_dir)


def test_a_directory_inside_that_becomes_a_link_is_not_followed(
    own: EngineDirectories, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = directories._entries

    def listed_then_swapped(directory: int) -> Iterator[tuple[str, bool]]:
        found = list(entries(directory))
        inner = Path(own.run_dir) / "inner"
        if inner.is_dir() and not inner.is_symlink():
            shutil.rmtree(inner)
            inner.symlink_to(victim)
        return iter(found)

    monkeypatch.setattr(directories, "_entries", listed_then_swapped)
    own.remove()
    assert stands(victim)


def test_a_parent_that_only_the_starter_had_is_known_to_the_processes_that_it_starts(
    own: EngineDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "_noted", set())
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    own.remove()
    assert os.path.isdir(own.run_dir)
    directories.note_place(own.run_dir)
    own.remove()
    assert not os.path.exists(own.run_dir)


@pytest.mark.parametrize(
    "where", ["missing", "file", "unwritable", "relative", "too long", "surrogate", "null"]
)
def test_a_place_that_cannot_be_had_is_passed_over(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "relative").mkdir()
    monkeypatch.chdir(tmp_path)
    values = {
        "missing": str(tmp_path / "missing"),
        "file": str(tmp_path / "file"),
        "unwritable": "/proc",
        "relative": "relative",
        "too long": str(tmp_path / ("x" * 90)),
        "surrogate": f"{tmp_path}/\udcff",
        "null": str(tmp_path / "missing\nline"),
    }
    os.makedirs(values["too long"])
    monkeypatch.setenv("XDG_RUNTIME_DIR", values[where])
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    own = EngineDirectories.make()
    assert Path(own.run_dir).parent == place
    own.remove()


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("function", ["mkdir", "open"])
def test_without_room_anywhere_the_start_fails_with_the_places_and_what_to_do(
    place: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        with pytest.raises(EngineStartError, match="No space left on device") as caught:
            EngineDirectories.make()
    assert str(place) in str(caught.value)
    assert "set TMPDIR" in str(caught.value)
    assert [path.name for path in place.iterdir()] == ["shm"]


def test_without_any_temporary_directory_the_others_are_tried(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert directories.places() == [str(place), "/tmp", f"/run/user/{os.geteuid()}"]
    own = EngineDirectories.make()
    assert Path(own.run_dir).parent == place
    own.remove()


def test_of_what_a_client_names_only_its_sockets_are_removed(own: EngineDirectories, victim: Path) -> None:
    run_dir = own.run_dir
    for name in ("c-1.in", "c-1.out", "host.sock"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"{run_dir}/{name}")
    (Path(run_dir) / "engine.json").touch()
    (Path(run_dir) / "c-2.in").mkdir()
    (Path(run_dir) / "c-3.in").symlink_to(victim / "thesis")
    (Path(run_dir) / "c-4.in").touch()
    before = set(os.listdir(run_dir))
    names = ["host.sock", "engine.json", "marker", "c-2.in", "c-3.in", "c-4.in", "c-5.in", ".", "", "c-\0.in"]
    paths = [f"{run_dir}/{name}" for name in names]
    for path in [*paths, str(victim / "thesis"), f"{run_dir}/../{victim.name}/thesis", "x" * 10**6, "\udcff"]:
        remove_client_socket(run_dir, path)
    assert set(os.listdir(run_dir)) == before
    assert stands(victim)
    remove_client_socket(run_dir, f"{run_dir}/c-1.in")
    assert before - set(os.listdir(run_dir)) == {"c-1.in"}


def test_a_thread_that_removes_what_another_one_is_removing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = EngineDirectories.make()
    empty, begun, go_on = directories._empty, threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(60)
        empty(*arguments)

    monkeypatch.setattr(directories, "_empty", slowly)
    first, second = (threading.Thread(target=made.remove) for _ in range(2))
    first.start()
    assert begun.wait(60)
    second.start()
    # The thread that returns may end the process, and the removal with it.
    second.join(0.1)
    assert second.is_alive()
    go_on.set()
    for thread in (second, first):
        thread.join(60)
        assert not thread.is_alive()
    assert not any(map(os.path.exists, made.paths))
