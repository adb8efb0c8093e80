"""Models on the hub by id: this module says which files of a repository are needed, and takes a snapshot of
them into the hub's own cache."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from nbengine.errors import ModelLoadError, ModelNotFoundError, quoted, shown
from nbengine.models.checkpoints.tokenizer_prepare import BESIDE, VOCABULARIES
from nbengine.runtime.progress import Reporter

_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_TIMEOUT_SECONDS = 10.0
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)
_SMALL_PATTERNS = (*_SMALL_FILES, *VOCABULARIES, *BESIDE)
_WEIGHTS = {"safetensors": "*.safetensors", "gguf": "*.gguf"}
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tekken.json", "added_tokens.json")
_OTHER_WEIGHTS = ("consolidated*", "adapter_*")
"""Safetensors files that are not the model in Hugging Face's own layout."""


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form `owner/name`."""
    return _REPOSITORY.fullmatch(name) is not None and not name.endswith(".gguf")


def is_offline() -> bool:
    """Return whether the environment forbids going to the hub (`HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`)."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in {"1", "ON", "YES", "TRUE"} for value in values)


def summary(error: BaseException) -> str:
    """Return the kind and first line of an error, for a list of what was tried."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def quiet_when_reported(report: Reporter) -> Iterator[None]:
    """Show no progress bars of the hub's library while `report` tells someone of the progress."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if not report.heard or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def snapshot(
    repository: str,
    revision: str | None,
    load_format: str,
    is_complete: Callable[[Path], bool],
    report: Reporter,
) -> Path:
    """Return a directory with the repository's model: the hub cache's copy when `is_complete`, else a
    download.

    Raises:
        ModelNotFoundError: neither the cache nor the hub has it; the message says what was tried.
        ModelLoadError: the repository has no weights in a format that can be loaded, or too many to choose.
    """
    cached = cached_snapshot(repository, revision)
    if cached is not None and is_complete(cached):
        return cached
    in_cache = "not there" if cached is None else "incomplete"
    if is_offline():
        raise _not_found(repository, revision, in_cache, "HF_HUB_OFFLINE is set")
    report(f"looking for {repository} on the hub")
    sizes = _list_files(repository, revision, in_cache)
    wanted = model_files(repository, list(sizes), load_format)
    total = sum(sizes[name] for name in wanted)
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    store = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    with report.watching(store, total, f"downloading {repository}"), quiet_when_reported(report):
        try:
            return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
        except Exception as error:
            raise _not_found(repository, revision, in_cache, summary(error)) from error


def configuration(repository: str, revision: str | None, load_format: str) -> tuple[Path, int]:
    """Return a directory with a repository's config.json, and the bytes of its weights, which are not
    downloaded.

    Raises:
        ModelNotFoundError: neither the cache nor the hub has it; the message says what was tried.
        ModelLoadError: the repository has no weights that can be loaded, or no config.json.
    """
    cached = cached_snapshot(repository, revision)
    in_cache = "not there" if cached is None else "incomplete"
    if is_offline():
        raise _not_found(repository, revision, in_cache, "HF_HUB_OFFLINE is set")
    sizes = _list_files(repository, revision, in_cache)
    wanted = model_files(repository, list(sizes), load_format)
    if "config.json" not in wanted:
        raise ModelLoadError(
            f"{repository} has no config.json, so its size is in its weights alone; `nbengine fetch {repository}` "
            "downloads them"
        )
    from huggingface_hub import snapshot_download

    small = [
        name for name in wanted if _is_small(name) and name.endswith(".json") and name not in _TOKENIZERS
    ]
    try:
        directory = Path(snapshot_download(repository, revision=revision, allow_patterns=small))
    except Exception as error:
        raise _not_found(repository, revision, in_cache, summary(error)) from error
    return directory, sum(sizes[name] for name in wanted if not _is_small(name))


def model_files(repository: str, names: list[str], load_format: str) -> list[str]:
    """Choose the repository's files that a model needs: one kind of weights, configuration and tokenizer.

    Raises:
        ModelLoadError: the repository has no weights in a format that can be loaded, or too many to choose.
    """
    found = {
        kind: [
            name
            for name in names
            if fnmatch.fnmatch(name, pattern)
            and "/" not in name
            and not any(fnmatch.fnmatch(name, other) for other in _OTHER_WEIGHTS)
        ]
        for kind, pattern in _WEIGHTS.items()
        if load_format in ("auto", kind)
    }
    small = [name for name in names if _is_small(name)]
    if found.get("safetensors"):
        return small + found["safetensors"]
    ggufs = found.get("gguf", [])
    if len(ggufs) == 1:
        return small + ggufs
    if ggufs:
        listed = ", ".join(sorted(ggufs))
        raise ModelLoadError(f"{repository} has several GGUF files; download one and pass its path: {listed}")
    raise ModelLoadError(f"{repository} has no {' or '.join(_WEIGHTS[kind] for kind in found)} files")


def _is_small(name: str) -> bool:
    """Return whether a file is none of the weights, and may be needed."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in _SMALL_PATTERNS)


def cached_snapshot(repository: str, revision: str | None) -> Path | None:
    """Find what the hub's own cache has of a repository, which may be incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _list_files(repository: str, revision: str | None, in_cache: str) -> dict[str, int]:
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(
            repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
        )
    except Exception as error:
        raise _not_found(repository, revision, in_cache, summary(error)) from error
    return {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}


def _not_found(repository: str, revision: str | None, in_cache: str, on_hub: str) -> ModelNotFoundError:
    at = "" if revision is None else f" at revision {shown(revision)}"
    return ModelNotFoundError(
        f"no model {quoted(repository)}{at}: there is no such directory; local hub cache: {in_cache}; hub: {on_hub}"
    )
