"""The installer takes everything from a folder of wheels, and says what is wrong when it cannot."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

INSTALL = Path(__file__).parents[2] / "tools" / "install.py"
CLOSED = "http://127.0.0.1:9/simple"
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
[project]
name = "small"
dependencies = ["one"]
[project.optional-dependencies]
some = ["two>=2"]
all = ["small[some]", "three", "small[all]"]
gpu = ["four"]
"""


def load_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", INSTALL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["install"] = module
    spec.loader.exec_module(module)
    return module


install: Any = load_module()


def write_wheel(folder: Path, name: str, version: str = "1.0", text: str = "") -> Path:
    """Write a wheel of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", text or f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def project(tmp_path: Path) -> Any:
    root = tmp_path / "project"
    root.mkdir()
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "constraints.txt").write_text("one==1.0\nThree_x==3\nsetuptools==80.0\nuv==0.1\n")
    return install.Project(root)


@pytest.fixture
def environment(tmp_path: Path, project: Any) -> Any:
    """This environment, whose pip and uv are real, with an empty folder of wheels."""
    folder = install.WheelFolder(tmp_path / "wheels")
    return install.Environment(Path(sys.prefix), folder, project.constraints)


def test_extras_bring_their_requirements_and_those_of_other_extras(project: Any) -> None:
    assert project.requirements([]) == ["one", "setuptools>=77"]
    assert project.requirements(["all"]) == ["one", "setuptools>=77", "three", "two>=2"]
    assert project.extras() == ["some", "all"]
    with pytest.raises(install.InstallError, match=r"extra 'docs' is unknown; .*: all, gpu, some"):
        project.requirements(["docs"])


def test_this_checkouts_requirements_are_all_pinned() -> None:
    project = install.Project(INSTALL.parents[1])
    pinned = {line.partition("==")[0].strip() for line in project.constraints.read_text().splitlines()}
    normal = {install.normal(name) for name in pinned}
    wanted = [r for r in project.requirements(project.extras()) if not r.startswith("triton")]
    names = {
        install.normal(r.partition(";")[0].strip(" ").split("[")[0].split(">")[0].split("<")[0])
        for r in wanted
    }
    assert names <= normal
    assert install.pin_of(project.constraints, "uv").startswith("uv==")


def test_a_wheel_comes_with_its_sum_and_a_damaged_one_is_named(environment: Any, tmp_path: Path) -> None:
    folder = environment.folder
    wheel = write_wheel(tmp_path / "staged", "one")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert folder.add(wheel.parent) == 1
    assert (folder.path / "SHA256SUMS").read_text() == f"{digest}  {wheel.name}\n"
    folder.check()
    # The same one again is not new; a different one of the same name takes its place.
    write_wheel(tmp_path / "staged", "one", text="changed = True\n")
    assert folder.add(wheel.parent) == 0
    folder.check()
    (folder.path / wheel.name).write_bytes(b"damaged")
    with pytest.raises(install.InstallError, match=rf"{wheel.name} is not the file that was kept"):
        folder.check()


def test_a_wheel_that_nobody_noted_is_refused(environment: Any) -> None:
    write_wheel(environment.folder.path, "planted")
    with pytest.raises(install.InstallError, match="planted"):
        environment.folder.check()


def test_what_is_pinned_stays_and_what_was_long_unused_goes(environment: Any, tmp_path: Path) -> None:
    folder = environment.folder
    for name, version in (("one", "1.0"), ("three_x", "3"), ("old", "1.0"), ("recent", "1.0")):
        write_wheel(tmp_path / "staged", name, version)
    folder.add(tmp_path / "staged")
    long_ago = time.time() - (install.UNUSED_DAYS + 1) * 86400
    (folder.path / f"{install.STAGED}cut-off").mkdir()
    for path in folder.path.iterdir():
        if not path.name.startswith("recent"):
            os.utime(path, (long_ago, long_ago))
    folder.forget_unused(environment.constraints)
    assert sorted(path.name.split("-")[0] for path in folder.path.iterdir()) == [
        "SHA256SUMS",
        "one",
        "recent",
        "three_x",
    ]
    assert time.time() - (folder.path / "one-1.0-py3-none-any.whl").stat().st_mtime < 3600


def test_a_folder_that_has_everything_is_installed_from_and_no_index_is_asked(
    environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", CLOSED)
    monkeypatch.setenv("UV_DEFAULT_INDEX", CLOSED)
    write_wheel(tmp_path / "staged", "one")
    write_wheel(tmp_path / "staged", "apart_one", "0.5")
    environment.folder.add(tmp_path / "staged")
    install.bring_wheels(environment, ["one"], ["apart_one==0.5"], given=False)
    assert "the package index is not asked" in capsys.readouterr().out
    target = tmp_path / "target"
    done = environment.uv("-c", str(environment.constraints), "--target", str(target), "one")
    assert done.returncode == 0, done.stderr
    assert (target / "one.py").read_text() == "version = '1.0'\n"


@pytest.mark.parametrize("given", [False, True])
def test_without_an_index_one_line_says_what_is_missing_and_what_to_do(
    environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", CLOSED)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setattr(install, "OUTAGE_SECONDS", 0.0 if given else 30.0)
    monkeypatch.setattr(install, "PAUSE_SECONDS", 29.0)
    monkeypatch.setattr(install.time, "sleep", lambda _: None)
    write_wheel(tmp_path / "staged", "one", "0.9")
    environment.folder.add(tmp_path / "staged")
    with pytest.raises(install.InstallError) as caught:
        install.bring_wheels(environment, ["one"], [], given=given)
    message = str(caught.value)
    assert "\n" not in message
    assert "one==1.0" in message
    if given:
        assert f"{environment.folder.path} does not have everything" in message
    else:
        assert message.startswith("the package index cannot be reached")
        assert "make wheels DIR=folder" in message
        assert "make install WHEELS=folder" in message


def test_a_wrong_extra_ends_the_command_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(INSTALL), sys.prefix, "--extra", "docz", "--wheels", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "extra 'docz' is unknown" in done.stderr
