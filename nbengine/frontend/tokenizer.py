"""The model's tokenizer, loaded without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError, ModelNotFoundError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
]
_HUB_TIMEOUT = 10.0


def resolve_tokenizer(name: str) -> str:
    """The directory of a tokenizer that is not the model's own: `name` is one, or a hub id.

    Raises:
        ModelNotFoundError: it is neither.
        ModelLoadError: there is no `tokenizer.json`.
    """
    try:
        directory = Path(name).expanduser()
        is_directory = directory.is_dir()
    except (OSError, RuntimeError) as error:
        raise ModelNotFoundError(f"no tokenizer {name!r}: {error}") from error
    if not is_directory:
        directory = _from_hub(name)
    if not (directory / "tokenizer.json").is_file():
        raise ModelLoadError(f"tokenizer {name!r}: {directory} has no tokenizer.json")
    return str(directory.absolute())


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a resolved model from the directory `config.tokenizer`, else from the model's own.

    `AutoTokenizer` would import torch; `tokenizer.json` describes the whole tokenizer, so that it is not needed.
    The backend neither truncates nor pads, whatever the file says.

    Raises:
        ModelLoadError: the directory's files cannot be read.
    """
    from transformers import PreTrainedTokenizerFast

    directory = config.tokenizer or config.directory
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"the tokenizer in {directory} cannot be loaded: {error}") from error
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return tokenizer


def _from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
        if (cached / "tokenizer.json").is_file():
            return cached
    except LocalEntryNotFoundError:
        in_cache = "not there"
    except HFValidationError as error:
        raise ModelNotFoundError(f"no tokenizer {name!r}: neither a directory nor a hub id") from error
    else:
        in_cache = "incomplete"
    try:
        # Fails at once where the hub is out of reach; the download by itself would try for half a minute.
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:
        raise ModelNotFoundError(
            f"no tokenizer {name!r}: not a directory; local hub cache: {in_cache}; hub: {error}"
        ) from error
