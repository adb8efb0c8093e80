"""A scratch folder that nobody owns goes with all that belongs to it; no other one does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbengine.ipc.liveness import ProcessIdentity, identity_of, machine_id, this_process
from tests.tools import scratch, tests_cache
from tests.tools.imports import ROOT

IS_ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def dead() -> ProcessIdentity:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = identity_of(process.pid)
        process.kill()
    assert found is not None
    return found


def make_folder(parent: Path, owner: ProcessIdentity, machine: str | None = None) -> Path:
    path = parent / scratch.name_of(owner)
    (path / "inner" / "closed").mkdir(parents=True)
    (path / "inner" / "file").write_text("x")
    (path / "inner" / "closed").chmod(0)
    (path / scratch.MACHINE).write_text(machine or machine_id())
    return path


def test_a_name_tells_the_owner() -> None:
    for owner in (this_process(), ProcessIdentity(4194304, 36**6), ProcessIdentity(1, 0)):
        name = scratch.name_of(owner)
        assert scratch.owner_of(name) == owner
        assert len(name) <= len("nbt-") + 5 + len("-") + 7
    assert scratch.owner_of("nbt-k9w2jsd_") is None
    assert scratch.owner_of(".nbt-1-1") is None


def test_the_folder_of_a_dead_owner_goes(tmp_path: Path, dead: ProcessIdentity) -> None:
    path = make_folder(tmp_path, dead)
    assert scratch.sweep(tmp_path) == []
    assert not path.exists()


def test_a_later_process_with_the_pid_is_not_the_owner(tmp_path: Path) -> None:
    own = this_process()
    path = make_folder(tmp_path, ProcessIdentity(own.pid, own.started - 1))
    scratch.sweep(tmp_path)
    assert not path.exists()


def test_the_folder_of_a_living_owner_stays(tmp_path: Path) -> None:
    path = make_folder(tmp_path, this_process())
    scratch.sweep(tmp_path)
    assert (path / "inner" / "file").read_text() == "x"


def test_what_is_no_scratch_folder_stays(tmp_path: Path, dead: ProcessIdentity) -> None:
    (tmp_path / "nbt-k9w2jsd_").mkdir()
    elsewhere = make_folder(tmp_path / "elsewhere", dead)
    (tmp_path / scratch.name_of(dead)).symlink_to(elsewhere)
    scratch.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"nbt-k9w2jsd_", "elsewhere", scratch.name_of(dead)}
    assert (elsewhere / "inner" / "file").exists()


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a folder away")
def test_the_folder_of_another_user_stays(tmp_path: Path, dead: ProcessIdentity) -> None:
    path = make_folder(tmp_path, dead)
    os.chown(path, 12345, 12345)
    scratch.sweep(tmp_path)
    assert path.exists()


def test_an_owner_in_another_container_is_not_known_to_be_dead(tmp_path: Path, dead: ProcessIdentity) -> None:
    boot = machine_id().split(":")[0]
    path = make_folder(tmp_path, dead, f"{boot}:1:2")
    scratch.sweep(tmp_path)
    assert path.exists()


def test_an_owner_of_an_earlier_boot_is_dead(tmp_path: Path) -> None:
    path = make_folder(tmp_path, this_process(), "another:1:2")
    scratch.sweep(tmp_path)
    assert not path.exists()


def test_a_folder_that_does_not_say_its_machine_yet_is_left_for_a_while(
    tmp_path: Path, dead: ProcessIdentity
) -> None:
    path = make_folder(tmp_path, dead)
    (path / scratch.MACHINE).unlink()
    scratch.sweep(tmp_path)
    assert path.exists()
    long_ago = time.time() - 2 * scratch.UNMARKED_SECONDS
    os.utime(path, (long_ago, long_ago))
    scratch.sweep(tmp_path)
    assert not path.exists()


@pytest.fixture
def orphan(tmp_path: Path, dead: ProcessIdentity) -> Iterator[psutil.Process]:
    """A process of a dead owner's scratch folder that is no child of this one."""
    environment = os.environ | {scratch.VARIABLE: str(tmp_path / scratch.name_of(dead) / "nbt-1-1")}
    command = ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    process = psutil.Process(int(done.stdout))
    yield process
    if process.is_running():
        process.kill()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes do not tell their environment")
@pytest.mark.parametrize("has_folder", [True, False])
def test_processes_of_a_dead_owner_are_ended(
    tmp_path: Path, dead: ProcessIdentity, orphan: psutil.Process, has_folder: bool
) -> None:
    if has_folder:
        make_folder(tmp_path, dead)
    (tmp_path / "other").mkdir()
    assert scratch.sweep(tmp_path / "other") == []
    assert orphan.is_running()
    assert scratch.sweep(tmp_path) == ["sleep 600"]
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert scratch.sweep(tmp_path) == []


def test_tests_write_into_the_folder_of_their_run() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert scratch.enter() is None
    folder = Path(os.environ[scratch.VARIABLE])
    assert scratch.owner_of(folder.name) is not None
    assert os.environ["TMPDIR"] == str(folder)
    assert tests_cache.cache_dir().name == "tests"


def test_a_script_in_a_scratch_folder_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, tempfile\n"
        "open(tempfile.mkdtemp() + '/file', 'w').close()\n"
        "print(tempfile.gettempdir(), sys.argv[1], os.environ.get('NBENGINE_CACHE_DIR'))\n"
        "sys.exit(3)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != scratch.VARIABLE}
    environment |= {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.tools.scratch", str(script), "argument"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    place, argument, cache = done.stdout.split()
    assert (done.returncode, argument, cache) == (3, "argument", os.environ["NBENGINE_CACHE_DIR"])
    assert scratch.owner_of(Path(place).name) is not None
    assert not Path(place).exists()


def test_the_cache_keeps_what_is_of_real_models_and_what_a_run_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBENGINE_CACHE_DIR", str(tmp_path))
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    own = tests_cache.make()
    assert (own / "models" / "smollm2-135m").samefile(tmp_path / "models" / "smollm2-135m")
    assert tests_cache.make() == own
    names = ["models/random-tiny-v1-seed0", "prepared/model-1", "prepared/SmolLM2-135M-Instruct.Q4_1-1"]
    names += ["weights/model-1.weights", "weights/SmolLM2-135M-Instruct-1.weights", "kernels/1.o"]
    for name in names:
        (own / name).mkdir(parents=True)
    tests_cache.prune(own, time.time() - 3600)
    assert [name for name in names if not (own / name).exists()] == []
    # A run that begins now may use what an earlier one has made, which may end before it.
    for name in names:
        os.utime(own / name, (time.time() - 60, time.time() - 60))
    began = time.time()
    tests_cache.adopt(own)
    tests_cache.prune(own, began)
    assert [name for name in names if not (own / name).exists()] == []
    tests_cache.prune(own, float("inf"))
    assert [name for name in names if (own / name).exists()] == [names[2], names[4], names[5]]
    assert (own / "models" / "smollm2-135m").is_symlink()
    long_ago = time.time() - 2 * tests_cache.UNUSED_SECONDS
    os.utime(own / names[4], (long_ago, long_ago))
    tests_cache.prune(own, float("inf"))
    assert not (own / names[4]).exists()
    assert (tmp_path / "models" / "smollm2-135m").is_dir()
