"""This module finds a model's files by its name: directories, GGUF files, aliases and hub ids. It is free of
torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nbengine.config import ModelConfig
from nbengine.errors import InvalidArgumentError, ModelLoadError, ModelNotFoundError, quoted, shown
from nbengine.ipc.private import reason_of
from nbengine.models.checkpoints import hub
from nbengine.models.checkpoints.fetch import ALL_MINILM_L6_V2, SMOLLM2_135M, fetch_pinned
from nbengine.models.checkpoints.gguf_prepare import prepared_directory
from nbengine.models.checkpoints.regular_files import check_regular, check_regular_files
from nbengine.models.checkpoints.storage import cache_dir
from nbengine.models.checkpoints.tiny import random_tiny, random_tiny_moe
from nbengine.models.checkpoints.tokenizer_prepare import has_tokenizer, no_tokenizer
from nbengine.models.configs.encoder_config import is_encoder
from nbengine.models.configs.hf_config import load_hf_config, read_json_object
from nbengine.models.configs.quantization_config import stored_quantization
from nbengine.models.registry import has_experts
from nbengine.runtime.progress import ProgressCallback, Reporter

__all__ = ["ProgressCallback", "cache_dir", "list_aliases", "resolve_model"]

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """The directory of a model's configuration and tokenizer, and its weight files."""

    directory: Path
    weights: tuple[Path, ...]


def resolve_model(config: ModelConfig, progress: ProgressCallback | None = None) -> ModelConfig:
    """Find the files of `config.model`, fetching or making what is missing; a resolved configuration is
    returned as it is.

    A name is, in this order: a directory, a .gguf file, an alias (`list_aliases`), a hub id `owner/name`.
    `progress` gets messages of the stage "fetch", possibly from another thread, and must not raise.

    Raises:
        ModelNotFoundError: no model goes by that name; the message says what was tried.
        ModelLoadError: the files are incomplete or of a kind that cannot be loaded.
        InvalidArgumentError: `quantization` is given for a model that cannot be rounded.
    """
    if config.resolved:
        return config
    files = _find(config, Reporter(progress, "fetch"))
    if config.tokenizer is None and not has_tokenizer(files.directory):
        raise no_tokenizer(files.directory)
    weights = tuple(str(path.absolute()) for path in files.weights)
    for path in (str(files.directory.absolute()), *weights):
        _check_utf8(path)
    found = replace(config, directory=str(files.directory.absolute()), weights=weights)
    return _described(found)


def _described(config: ModelConfig) -> ModelConfig:
    """Enter what config.json says into a configuration, and compare the two."""
    hf_config = load_hf_config(config)
    if config.quantization is not None:
        stored = None
        if any(path.lower().endswith(".gguf") for path in config.weights):
            stored = "GGUF files keep their own block types"
        elif is_encoder(hf_config):
            stored = "encoders are computed in 16 or 32 bits"
        elif (quantization := stored_quantization(hf_config)) is not None:
            stored = f"its weights are quantised already, by {quantization.method.upper()}"
        if stored is not None:
            raise InvalidArgumentError("quantization", config.quantization, f"None for this model ({stored})")
    return replace(config, is_moe=has_experts(hf_config))


def _check_utf8(path: str) -> None:
    # The engine's processes read the path in a file.
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ModelLoadError(f"the model's path {shown(path)} cannot be written as UTF-8") from error


def resolve_configuration(
    config: ModelConfig, progress: ProgressCallback | None = None
) -> tuple[ModelConfig, int]:
    """Do what `resolve_model` does, and return the bytes of the weight files, too. Of a model on the hub that
    is not in the cache only the configuration is fetched: the result then has no `weights`.

    Raises:
        ModelNotFoundError, ModelLoadError, InvalidArgumentError: as `resolve_model` does.
    """
    if _is_on_hub(config) and not _cached_on_hub(config):
        directory, num_bytes = hub.configuration(config.model, config.revision, config.load_format)
        found = replace(config, directory=str(directory.absolute()))
        return _described(found), num_bytes
    found = resolve_model(config, progress)
    return found, sum(Path(path).stat().st_size for path in found.weights)


def _is_on_hub(config: ModelConfig) -> bool:
    name = config.model
    return name not in _ALIASES and hub.is_hub_id(name) and not Path(name).expanduser().exists()


def _cached_on_hub(config: ModelConfig) -> bool:
    directory = hub.cached_snapshot(config.model, config.revision)
    return directory is not None and _is_complete(directory, config)


def list_aliases() -> dict[str, str]:
    """List the short names of models that need no path and no hub, with a line about each."""
    return {name: alias.description for name, alias in _ALIASES.items()}


SMOLLM2_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""The parameters in the examples of the model's card. Its file has none, and at temperature 1 so small a
model loses the thread."""


@dataclass(frozen=True)
class _Alias:
    description: str
    find: Callable[[ModelConfig, Reporter], ModelFiles]


def _smollm2(config: ModelConfig, report: Reporter) -> ModelFiles:
    path = fetch_pinned(SMOLLM2_135M, cache_dir() / "models" / "smollm2-135m", report)
    return _gguf_file(path, config.load_format, report, SMOLLM2_SAMPLING)


def _all_minilm(config: ModelConfig, report: Reporter) -> ModelFiles:
    path = fetch_pinned(ALL_MINILM_L6_V2, cache_dir() / "models" / "all-minilm-l6-v2", report)
    return _in_directory(path.parent, config.load_format, report)


def _random_tiny(config: ModelConfig, report: Reporter) -> ModelFiles:
    return _in_directory(random_tiny(cache_dir() / "models", config.seed), config.load_format, report)


def _random_tiny_moe(config: ModelConfig, report: Reporter) -> ModelFiles:
    return _in_directory(random_tiny_moe(cache_dir() / "models", config.seed), config.load_format, report)


_ALIASES = {
    "smollm2-135m": _Alias("SmolLM2-135M-Instruct, 4-bit (Q4_1 GGUF, 98 MB); the default", _smollm2),
    "all-minilm-l6-v2": _Alias("all-MiniLM-L6-v2, embeddings of sentences (91 MB)", _all_minilm),
    "random-tiny": _Alias("a small dense model with random weights, made from the seed", _random_tiny),
    "random-tiny-moe": _Alias("the same with 8 experts, of which a token takes 2", _random_tiny_moe),
}


def _find(config: ModelConfig, report: Reporter) -> ModelFiles:
    name = config.model
    alias = _ALIASES.get(name)
    try:
        path = Path(name).expanduser()
        is_directory = path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelNotFoundError(f"no model {quoted(name)}: {reason_of(error)}") from error
    if is_directory and (alias is None or (path / "config.json").is_file()):
        return _in_directory(path, config.load_format, report)
    if path.suffix.lower() == ".gguf":
        return _gguf_file(path, config.load_format, report)
    if alias is not None:
        return alias.find(config, report)
    if hub.is_hub_id(name):
        return _on_hub(config, report)
    raise _unknown(name)


def _in_directory(directory: Path, load_format: str, report: Reporter) -> ModelFiles:
    check_regular_files(directory)
    if load_format != "gguf":
        weights = _safetensors_files(directory)
        if weights:
            if not (directory / "config.json").is_file():
                raise ModelLoadError(f"{directory} has safetensors files but no config.json")
            return ModelFiles(directory, weights)
    ggufs = sorted(directory.glob("*.gguf")) if load_format != "safetensors" else []
    if len(ggufs) == 1:
        return _gguf_file(ggufs[0], load_format, report)
    if ggufs:
        names = ", ".join(path.name for path in ggufs)
        raise ModelLoadError(f"{directory} has several GGUF files; pass the path of one: {names}")
    wanted = {"auto": "*.safetensors or *.gguf", "safetensors": "*.safetensors", "gguf": "*.gguf"}[
        load_format
    ]
    raise ModelLoadError(f"{directory} has no weights ({wanted})")


def _safetensors_files(directory: Path) -> tuple[Path, ...]:
    index = directory / _INDEX
    if index.is_file():
        return _indexed_shards(directory, read_json_object(index))
    single = directory / "model.safetensors"
    return (single,) if single.is_file() else tuple(sorted(directory.glob("*.safetensors")))


def _indexed_shards(directory: Path, index: dict[str, object]) -> tuple[Path, ...]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{directory / _INDEX} has no weight_map")
    names = sorted(set(map(str, weight_map.values())))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelLoadError(f"{directory / _INDEX} names files outside its directory: {', '.join(outside)}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelLoadError(f"{directory} lacks weight files that its index names: {', '.join(missing)}")
    return tuple(directory / name for name in names)


def _gguf_file(
    path: Path, load_format: str, report: Reporter, advised: Mapping[str, float] | None = None
) -> ModelFiles:
    check_regular(path)
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {shown(path)}")
    if load_format == "safetensors":
        raise ModelLoadError(f"{path} is a GGUF file, but load_format is 'safetensors'")
    return ModelFiles(prepared_directory(path.absolute(), report, advised), (path,))


def _on_hub(config: ModelConfig, report: Reporter) -> ModelFiles:
    directory = hub.snapshot(
        config.model, config.revision, config.load_format, lambda found: _is_complete(found, config), report
    )
    return _in_directory(directory, config.load_format, report)


def _is_complete(directory: Path, config: ModelConfig) -> bool:
    """Return whether a snapshot of a hub's repository has everything that a model needs."""
    if not has_tokenizer(directory) and not any(directory.glob("*.gguf")):
        return False
    try:
        _in_directory(directory, config.load_format, Reporter(None, "fetch"))
    except ModelLoadError:
        return False
    return True


def _unknown(name: str) -> ModelNotFoundError:
    near = difflib.get_close_matches(name.lower(), list(_ALIASES), n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return ModelNotFoundError(
        f"no model {quoted(name)}: it is no directory, no .gguf file, no alias ({', '.join(_ALIASES)}) "
        f"and no hub id (owner/name){hint}"
    )
