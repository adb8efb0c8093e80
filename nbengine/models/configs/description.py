"""The small files that describe a model and its tokenizer, for frontends on machines that do not have
them."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError

SUFFIXES = (".json", ".jinja", ".txt")
MAX_FILE_BYTES = 64 << 20
MAX_DEPTH = 2
"""A file may lie in a directory within the model's directory, as `1_Pooling/config.json` does."""

Files = list[tuple[str, bytes]]
"""Names relative to a directory, "/" between their parts, and contents."""


class ModelDescription(msgspec.Struct):
    """The files of a model's directory and, if the tokenizer has another one, of that."""

    model: Files
    tokenizer: Files | None


def describe_model(config: ModelConfig) -> ModelDescription:
    """Read the files that describe a resolved model."""
    own = config.tokenizer_files == config.directory
    tokenizer = None if own else _read(Path(config.tokenizer_files))
    return ModelDescription(_read(Path(config.directory)), tokenizer)


@contextlib.contextmanager
def described_model(config: ModelConfig, description: ModelDescription) -> Iterator[ModelConfig]:
    """Put the model's files into directories on this machine, until the end of the block.

    Raises:
        ModelLoadError: the name of a file is not harmless.
    """
    with tempfile.TemporaryDirectory(prefix="nbengine-model-") as parent:
        directory, tokenizer = Path(parent, "model"), Path(parent, "tokenizer")
        _write(directory, description.model)
        if description.tokenizer is not None:
            _write(tokenizer, description.tokenizer)
        yield dataclasses.replace(
            config,
            directory=str(directory),
            tokenizer=None if description.tokenizer is None else str(tokenizer),
            tokenizer_directory="",
        )


def _read(directory: Path) -> Files:
    found = []
    for path in sorted(directory.glob("*")) + sorted(directory.glob("*/*")):
        small = path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES
        if small and not path.name.endswith(".index.json"):
            found.append((path.relative_to(directory).as_posix(), path.read_bytes()))
    return found


def _write(directory: Path, files: Files) -> None:
    directory.mkdir()
    for name, content in files:
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or not 1 <= len(place.parts) <= MAX_DEPTH:
            raise ModelLoadError(f"the engine's model has a file of the name {name!r}")
        path = directory / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
