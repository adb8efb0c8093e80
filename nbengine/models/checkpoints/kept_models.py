"""The models that lie on this machine: in nbengine's cache, in the hub's, and in directories that somebody has named.

Nothing is fetched, and of weight files only names and sizes are looked at. This module is free of torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbengine.config import ModelConfig
from nbengine.errors import NBEngineError, shown
from nbengine.ipc.private import reason_of
from nbengine.models.checkpoints.fetch import ALL_MINILM_L6_V2, SMOLLM2_135M, is_checked_copy
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.checkpoints.storage import cache_dir
from nbengine.models.configs.encoder_config import is_encoder
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.configs.quantization_config import stored_quantization

OWN_CACHE = "nbengine's cache"
HUB_CACHE = "the hub's cache"
_SHARD = re.compile(r".+-(?!00001)\d{5}-of-\d{5}\.gguf", re.IGNORECASE)
"""The names of all shards of a GGUF file but the first."""
_RANDOM = re.compile(r"(random-tiny(?:-moe)?)-v\d+-seed(\d+)")
_PINNED = {"smollm2-135m": SMOLLM2_135M, "all-minilm-l6-v2": ALL_MINILM_L6_V2}
_DEPTH = 2
"""The depth to which a directory is searched: for `model`, and for `owner/model`."""


@dataclass(frozen=True)
class KeptModel:
    """A model that lies on this machine; `name` is what an engine is started with.

    `config` has its files, and is None where `problem` says why it cannot be loaded.
    """

    name: str
    place: str
    num_bytes: int = 0
    """The bytes of the weights on disk."""
    kind: str = ""
    """Its class in config.json, and how its weights are stored."""
    config: ModelConfig | None = None
    is_encoder: bool = False
    problem: str = ""


def kept_models(directories: Sequence[str] = ()) -> list[KeptModel]:
    """List the models of both caches and of `directories`, in that order; a file that is met twice counts once.

    A directory that cannot be read, and a model that is incomplete, is listed with its problem.
    """
    found = [*_own(), *_on_hub()]
    for name in directories:
        found += _in_named(Path(name))
    seen: set[str] = set()
    unique = []
    for model in found:
        key = model.config.weights[0] if model.config is not None and model.config.weights else model.name
        if key not in seen:
            seen.add(key)
            unique.append(model)
    return unique


def _own() -> Iterator[KeptModel]:
    for directory in _children(cache_dir() / "models"):
        name = directory.name
        match = _RANDOM.fullmatch(name)
        if match:
            shown_name = match[1] + ("" if match[2] == "0" else f" --seed {match[2]}")
            yield _described(shown_name, OWN_CACHE, ModelConfig(model=match[1], seed=int(match[2])))
        elif name in _PINNED and all(
            is_checked_copy(directory / file.name, file) for file in _PINNED[name].files
        ):
            yield _described(name, OWN_CACHE, ModelConfig(model=name))
        elif name in _PINNED:
            problem = f"it is incomplete, or has not been checked: `nbengine fetch {name}` sees to that"
            yield KeptModel(name, OWN_CACHE, problem=problem)


def _on_hub() -> Iterator[KeptModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError):
        return  # There is none, or a file has its name.
    for repository in sorted(cache.repos, key=lambda each: each.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
        yield _described(repository.repo_id, HUB_CACHE, ModelConfig(model=str(newest.snapshot_path)))


def _in_named(directory: Path) -> Iterator[KeptModel]:
    try:
        directory = directory.expanduser()
        next(directory.iterdir(), None)
    except (OSError, RuntimeError, ValueError) as error:
        yield KeptModel(shown(directory), "directory", problem=f"cannot be read: {reason_of(error)}")
        return
    for path in _models_below(directory, _DEPTH):
        yield _described(str(path), shown(directory), ModelConfig(model=str(path)))


def _models_below(directory: Path, depth: int) -> Iterator[Path]:
    if (directory / "config.json").is_file():
        yield directory
        return
    children = _children(directory, with_files=True)
    yield from (
        path
        for path in children
        if path.suffix.lower() == ".gguf" and path.is_file() and not _SHARD.fullmatch(path.name)
    )
    if depth:
        for path in children:
            if path.is_dir():
                yield from _models_below(path, depth - 1)


def _children(directory: Path, *, with_files: bool = False) -> list[Path]:
    """List what a directory has, by name; nothing where it cannot be read, or is none."""
    try:
        return sorted(
            path for path in directory.iterdir() if path.name[:1] != "." and (with_files or path.is_dir())
        )
    except OSError:
        return []


def _described(name: str, place: str, asked: ModelConfig) -> KeptModel:
    try:
        config = resolve_model(asked)
        hf = load_hf_config(config)
        num_bytes = sum(Path(weights).stat().st_size for weights in config.weights)
    except NBEngineError as error:
        return KeptModel(name, place, problem=str(error))
    except OSError as error:
        return KeptModel(name, place, problem=reason_of(error))
    classes = ", ".join(map(str, hf.get("architectures") or ())) or "unknown class"
    quantization = stored_quantization(hf)
    stored = "" if quantization is None else quantization.method.upper()
    if config.weights[0].lower().endswith(".gguf"):
        stored = "GGUF"
    kind = f"{classes}, {stored}" if stored else classes
    return KeptModel(name, place, num_bytes, kind, config, is_encoder(hf))
