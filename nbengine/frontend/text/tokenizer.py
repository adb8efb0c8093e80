"""The model's tokenizer, loaded without torch."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError, ModelNotFoundError, quoted
from nbengine.frontend.text.stored_templates import chosen_templates
from nbengine.ipc.private import reason_of
from nbengine.models.checkpoints.regular_files import check_regular_files
from nbengine.models.checkpoints.tokenizer_prepare import (
    BESIDE,
    FAST,
    VOCABULARIES,
    has_tokenizer,
    no_tokenizer,
    prepared_tokenizer,
)
from nbengine.runtime.heap import trim_heap
from nbengine.runtime.progress import ProgressCallback, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILES = [FAST, *VOCABULARIES, *BESIDE]
_HUB_TIMEOUT = 10.0


def resolve_tokenizer(name: str) -> str:
    """Find the directory of a tokenizer that is not the model's own: `name` is a directory, or a hub id.

    Raises:
        ModelNotFoundError: `name` is neither.
        ModelLoadError: there is neither a `tokenizer.json` nor a vocabulary of which it can be made.
    """
    try:
        directory = Path(name).expanduser()
        is_directory = directory.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelNotFoundError(f"no tokenizer {quoted(name)}: {reason_of(error)}") from error
    if not is_directory:
        directory = _from_hub(name)
    check_regular_files(directory)
    if not has_tokenizer(directory):
        raise ModelLoadError(f"tokenizer {quoted(name)}: {no_tokenizer(directory)}")
    return str(directory.absolute())


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a resolved model, with the engine's chat template where it has one of its own.

    `AutoTokenizer` would import torch; `tokenizer.json` describes the whole tokenizer, so that it is not
    needed. The backend neither truncates nor pads, whatever the file says.

    Raises:
        ModelLoadError: the directory's files cannot be read.
    """
    from transformers import PreTrainedTokenizerFast

    directory = config.tokenizer_files
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"the tokenizer in {directory} cannot be loaded: {error}") from error
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    tokenizer.chat_template = chosen_templates(tokenizer.chat_template, Path(directory), config.chat_template)
    # Parsing its files took more memory than the tokenizer keeps.
    trim_heap()
    return tokenizer


def with_tokenizer(config: ModelConfig, progress: ProgressCallback | None = None) -> ModelConfig:
    """Return the configuration of a resolved model with the place of its tokenizer.json, which is made where
    `tokenizer_mode` asks for that (stage "fetch").

    Raises:
        ModelLoadError: the file is missing, or cannot be made; the message says what would do.
    """
    directory = Path(config.tokenizer or config.directory)
    prepared = prepared_tokenizer(directory, config.tokenizer_mode, Reporter(progress, "fetch"))
    if prepared == directory:
        return config
    return dataclasses.replace(config, tokenizer_directory=str(prepared.absolute()))


def import_early() -> None:
    """Import what `load_tokenizer` needs, which takes most of a second; for a moment when nobody waits.

    Only one thread may import transformers: others would find it half done.
    """
    # Where it cannot be imported, `load_tokenizer` says why.
    with contextlib.suppress(Exception):
        from transformers import PreTrainedTokenizerFast  # noqa: F401


def _from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
        if has_tokenizer(cached):
            return cached
    except LocalEntryNotFoundError:
        in_cache = "not there"
    except HFValidationError as error:
        raise ModelNotFoundError(f"no tokenizer {quoted(name)}: neither a directory nor a hub id") from error
    else:
        in_cache = "incomplete"
    try:
        # This fails at once where the hub is out of reach; the download by itself would try for half a
        # minute.
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:
        raise ModelNotFoundError(
            f"no tokenizer {quoted(name)}: not a directory; local hub cache: {in_cache}; hub: {error}"
        ) from error
